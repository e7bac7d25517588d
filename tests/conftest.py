"""What every test shares: where real data lies, and a check that no test leaves a process
behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fork_client, timeouts
from tests.timeouts import (  # noqa: F401
    pytest_enter_pdb,
    pytest_handlecrashitem,
    pytest_runtest_makereport,
    pytest_testnodedown,
    pytest_timeout_set_timer,
)

# Seconds for which the process that imports torch for workers waits for the next test that starts
# some. Tests about the start and end of processes unset it (tests/launch).
os.environ.setdefault("ALLHANDS_AGENT_IDLE", "300")
# Threads of torch that wait for one another sleep. Several processes of tests share the cores, and
# threads that spin instead keep those from working that they wait for: a test took forty times as
# long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A picture at the end of each of hundreds of trainings; tests of pictures ask for them.
os.environ.setdefault("ALLHANDS_CURVES", "0")

# A process that others wake waits for its turn on the core, and takes none from the one that wakes
# them. gloo holds a lock as it sends; its other thread, if it came at once, would ask for that lock
# until its own time is over. Where processes share cores, that was most of what gloo computed.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Python compiles a file once, not in each of the thousand processes that the tests start, and
# pytest keeps what it makes of a test's file.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Modules and tests are not garbage; to look for some while all are imported takes a fifth of the
# time. See pytest_collection_finish.
gc.disable()

# PyTorch's compiler keeps what it made for one set of instructions, and takes it for another one.
if "ATEN_CPU_CAPABILITY" in os.environ:
    own_cache = (
        Path(tempfile.gettempdir())
        / f"torchinductor_{os.getuid()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    )
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(own_cache))

# Folders of tests are in memory where there is enough of it: hundreds of checkpoints are saved, and
# each waits for the disk.
MEMORY = Path("/dev/shm")
if (
    MEMORY.is_dir()
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    and shutil.disk_usage(MEMORY).free > 2**31
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Its files are handed out as one, since they share worlds, but for those named below.
SHARE_WORLDS = "tests/faults/"
# Its tests are handed out one by one: each has a world of its own for as long as a file of others.
APART = "tests/conformance/"
# What takes longest comes first, so that none of it is left alone at the end.
LONGEST = (
    SHARE_WORLDS,
    "tests/launch/test_elastic.py",
    "tests/cluster/test_sites.py",
    "tests/launch/test_elastic_kvstore.py",
    "tests/wire/test_attacks.py",
    "tests/test_timeouts.py",
    "tests/cluster/test_mpirun.py",
    "tests/cluster/test_elastic.py",
    "tests/launch/test_soak_membership.py",
    "tests/kvstore/test_processes.py",
    "tests/kvstore/test_mid_round.py",
    "tests/walks/test_technician.py",
    "tests/world/test_world_processes.py",
    "tests/comm/test_mpi.py",
    "tests/loop/test_out_of_memory.py",
    "tests/walks/test_researcher.py",
    "tests/planning/test_plan.py",
    "tests/planning/test_derived_steps.py",
    "tests/planning/test_scaling.py",
    "tests/data/catalogue/test_catalogue.py",
    "tests/launch/test_failures.py",
    "tests/launch/test_elastic_meshes.py",
    "tests/launch/test_mpi.py",
    "tests/planning/test_dry_step.py",
    "tests/runner/test_notebook.py",
    "tests/runner/test_interrupt.py",
    "tests/faults/test_resume.py",
    "tests/launch/test_elastic_local_sgd.py",
    "tests/strategies/test_tensor.py",
    "tests/strategies/test_tensor_training.py",
    "tests/runner/test_evaluate_in_callback.py",
    "tests/comm/test_calls.py",
    "tests/strategies/test_kvstore.py",
    "tests/launch/test_join_client.py",
    "tests/kvstore/test_members.py",
    "tests/launch/test_nodes.py",
    "tests/runner/test_distributed.py",
    "tests/launch/test_scripts.py",
    "tests/cli/test_init.py",
    "tests/examples/test_runner_tutorial.py",
    "tests/strategies/test_sharded_state.py",
    "tests/federated/sites/test_sites_server.py",
    "tests/cluster/test_ssh_failures.py",
    "tests/cli/test_verify.py",
    "tests/cluster/test_slurm_launcher.py",
    "tests/federated/sites/test_site.py",
    "tests/federated/test_processes.py",
    "tests/examples/test_torch_notes.py",
    "tests/launch/test_elastic_rounds.py",
    "tests/federated/test_keyed_noise.py",
    "tests/launch/test_spawn.py",
    "tests/launch/test_signals.py",
    "tests/step/test_compiled.py",
    "tests/cluster/test_srun.py",
    "tests/walks/test_engineer.py",
    "tests/examples/test_federated_tutorial.py",
    "tests/examples/test_federated_digits.py",
    "tests/test_docs.py",
    "tests/examples/test_gpt.py",
    "tests/faults/test_half_written.py",
    "tests/verify/test_planted_faults.py",
    "tests/verify/test_script_runs.py",
    "tests/cluster/test_federated.py",
    "tests/examples/test_digits.py",
    "tests/cli/test_run.py",
    "tests/kvstore/test_mirror.py",
    "tests/faults/test_decisions.py",
    "tests/cluster/test_restarts.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests the signals of a terminal: under nohup, or in the background of a script, some
    are ignored, and every process that a test starts would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    timeouts.begin(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, hand out whole files, the longest first."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # by their number of tests

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def _reschedule(self, node: Any) -> None:
            """What xdist does, but for a process in the place of one that has ended, until it has
            collected its tests."""
            if node in self.registered_collections:
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """What xdist does, but that a test which has ended its process is not run again, to end
            the next one."""
            work = self.assigned_work.pop(node)
            ended_in = next(
                (test for unit in work.values() for test, is_over in unit.items() if not is_over),
                None,
            )
            if ended_in is None:
                return None
            for unit in work.values():
                if ended_in in unit:
                    unit[ended_in] = True
            self.workqueue.update(
                {name: unit for name, unit in work.items() if not all(unit.values())}
            )
            for other in self.assigned_work:
                self._reschedule(other)
            return ended_in

    return Files(config, log)


def unit_of(nodeid: str) -> str:
    """What is handed to one process as a whole."""
    if nodeid.startswith(APART):
        return nodeid
    path = nodeid.partition("::")[0]
    return SHARE_WORLDS if path.startswith(SHARE_WORLDS) and path not in LONGEST else path


def places_of(items: list[pytest.Item]) -> dict[str, float]:
    """Where each unit comes, from 0 to 1.

    Those that start processes wait for much of their time, and the others compute. Both kinds are
    spread over the whole run, so that no core is idle. Of each kind the longest come first.
    """
    several = dict.fromkeys(
        unit_of(item.nodeid)
        for item in items
        if item.get_closest_marker("serial") or item.get_closest_marker("cluster")
    )
    alone = dict.fromkeys(
        unit_of(item.nodeid) for item in items if unit_of(item.nodeid) not in several
    )
    order = {unit: number for number, unit in enumerate(LONGEST)}
    places = {}
    for kind in (several, alone):
        units = sorted(
            kind, key=lambda unit: -1 if unit.startswith(APART) else order.get(unit, len(order))
        )
        places |= {unit: (number + 0.5) / len(units) for number, unit in enumerate(units)}
    return places


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix files that wait with files that compute, and skip GPU tests, with a reason, where no GPU
    can be used."""
    places = places_of(items)
    items.sort(key=lambda item: places[unit_of(item.nodeid)])
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    count = torch.cuda.device_count()
    for item in gpu_items:
        marker = item.get_closest_marker("gpu")
        assert marker is not None
        needed = marker.args[0] if marker.args else 1
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), found {count}"))


def pytest_collection_finish() -> None:
    """Look for garbage from now on, but not among what there is; forks share its memory."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets (see DATASETS.md there); skips where it is absent."""
    candidates = [os.environ.get("ALLHANDS_DATA"), Path(__file__).parents[2] / "shared" / "data"]
    for candidate in candidates:
        if candidate and (Path(candidate) / "write_official.py").is_file():
            return Path(candidate)
    pytest.skip(
        "no data folder with write_official.py: set ALLHANDS_DATA to one (looked at $ALLHANDS_DATA "
        "and ../shared/data)"
    )


@pytest.fixture(scope="module")
def preloaded() -> Iterator[None]:
    """Workers that a training starts have one thread, and what it needs imported, as those of
    tests.worlds."""
    from allhands.launch import job
    from tests.worlds import ONE_THREAD, PRELOAD

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["allhands.launch.spawn"], "PRELOAD", (*job.PRELOAD, *PRELOAD))
        for name, value in ONE_THREAD.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def forked_python() -> Iterator[None]:
    """Scripts and commands that the tests of a file start by `sys.executable`, and by what lies
    beside it, find torch imported (see tests/fork_client.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(fork_client.bin_folder() / "python"))
        yield


@pytest.fixture
def new_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test about the start of Python, in a file with `forked_python`."""
    monkeypatch.setattr(sys, "executable", fork_client.PYTHON)


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """Fail the test whose script, run by `forked_python`, leaves a process behind."""
    yield
    if found := fork_client.left():
        pytest.fail(f"this test left processes running:\n{found}")


@pytest.fixture(autouse=True)
def _other_tests_stay_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import no modules of other tests, which a user's process would not have either.

    They would, for what such a module has computed and its source does not say. What helpers of
    other tests hold, such as a list of functions to call, would make them import all of these.
    """
    from allhands.launch import user_modules

    def own() -> Iterator[Any]:
        for module in own_modules():
            if not module.__name__.startswith("tests.") or module is request.module:
                yield module

    own_modules = user_modules._own_modules
    monkeypatch.setattr(user_modules, "_own_modules", own)


HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _no_handler_left() -> Iterator[None]:
    """Fail the test that leaves another handler of a signal, rather than whichever test comes next
    in that process."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    left = {
        number: handler
        for number, handler in before.items()
        if signal.getsignal(number) is not handler
    }
    for number, handler in left.items():
        signal.signal(number, handler)
    if left:
        pytest.fail(f"this test left other handlers of {', '.join(n.name for n in left)}")


@pytest.fixture(autouse=True)
def _no_world_left() -> Iterator[None]:
    """Fail the test that leaves its process in a world, rather than whichever test comes next in
    that process."""
    yield
    group = sys.modules.get("allhands.world.group")
    world = group.current_world() if group is not None else None
    if group is not None and world is not None:
        group.finalize()
        pytest.fail(f"this test left its process in a world: {world}")

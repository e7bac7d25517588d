"""`spawn` works wherever Python runs, never runs the caller's file again, and leaves nothing
behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from allhands.errors import UserError, WorkerError
from allhands.launch import idle_agents, ship, spawn, worker
from allhands.launch.processes import children
from tests.patience import patience

from .conftest import told_servers

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("shared_agent")]


def rank() -> int:
    return int(os.environ["RANK"])


def test_results_by_rank_in_one_world() -> None:
    def work(offset: int, *, scale: int) -> Any:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(rank())])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return {"total": total, "own": offset + scale * rank(), "active": worker.active()}

    results = spawn(work, (10,), {"scale": 2}, workers=3)
    assert [float(result["total"]) for result in results] == [3.0] * 3
    assert [result["own"] for result in results] == [10, 12, 14]
    assert all(result["active"] for result in results)


def test_messages_reach_the_caller_in_order() -> None:
    def work() -> None:
        for step in range(3):
            assert worker.send({"step": step, "rank": rank()})

    got: list[tuple[int, Any]] = []
    spawn(work, workers=2, on_message=lambda rank, message: got.append((rank, message)))
    for one in range(2):
        assert [m["step"] for r, m in got if r == one and m["rank"] == one] == [0, 1, 2]


def test_outside_a_worker_nobody_listens() -> None:
    assert not worker.active()
    assert worker.send({"step": 1}) is False


def test_a_child_of_a_worker_is_no_worker() -> None:
    def work() -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(10 + worker.active() + worker.send({}))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert spawn(work, workers=1) == [10]


def test_environment_threads_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TO_REMOVE", "x")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "only_here.py").write_text("def answer(): return 42")

    def work() -> Any:
        import only_here

        return [
            os.getcwd(),
            os.environ.get("TO_REMOVE"),
            os.environ["ADDED"],
            os.environ["OMP_NUM_THREADS"],
            only_here.answer(),
        ]

    expected = [str(tmp_path), None, "é", "5", 42]
    assert spawn(work, workers=1, env={"TO_REMOVE": None, "ADDED": "é"}, threads=5) == [expected]


def test_output_is_shown_and_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spawn(lambda: print("hello"), workers=2, log_dir=tmp_path)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] hello", "[1] hello"]
    assert (tmp_path / "rank-1.log").read_text() == "hello\n"


@pytest.mark.parametrize(
    ("how", "text", "code"),
    [
        (lambda: 1 / 0, "raised ZeroDivisionError: division by zero", 1),
        pytest.param(
            lambda: os._exit(0),
            "left with exit code 0 before its function returned",
            1,
            marks=pytest.mark.rare,
        ),
        pytest.param(
            lambda: sys.exit(0),
            "left with exit code 0 before its function returned",
            1,
            marks=pytest.mark.rare,
        ),
        pytest.param(
            lambda: sys.exit(5),
            "left with exit code 5 before its function returned",
            5,
            marks=pytest.mark.rare,
        ),
        (lambda: os.kill(os.getpid(), 9), "killed by SIGKILL", 137),
    ],
)
def test_a_failure_is_one_error(
    how: Any, text: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        if rank() == 1:
            how()
        time.sleep(60)

    folders: list[str] = []
    make = ship.make_directory

    def make_and_note(nbytes: int = 0) -> str:
        folders.append(make(nbytes))
        return folders[-1]

    monkeypatch.setattr(ship, "make_directory", make_and_note)
    with pytest.raises(WorkerError, match=text) as raised:
        spawn(work, workers=3, grace=1)
    assert raised.value.rank == 1
    assert raised.value.exit_code == code
    assert str(raised.value).startswith("rank 1 (")
    assert "stopped because of it: ranks 0, 2" in str(raised.value)
    assert len(folders) == 2
    assert not any(os.path.exists(folder) for folder in folders)


def test_the_error_has_the_workers_traceback() -> None:
    def inner() -> None:
        raise LookupError("nothing here")

    with pytest.raises(WorkerError) as raised:
        spawn(inner, workers=1)
    assert 'raise LookupError("nothing here")' in str(raised.value)
    assert f'File "{__file__}"' in str(raised.value)
    assert "spawn.py" not in str(raised.value).replace("test_spawn.py", "")


def test_a_user_error_stays_one() -> None:
    def work() -> None:
        raise UserError("batch_size=0: it must be at least 1")

    with pytest.raises(UserError, match=r"^batch_size=0: it must be at least 1$"):
        spawn(work, workers=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": 0}, "workers=0; it must be a whole number of at least 1"),
        ({"workers": 1.5}, "workers=1.5"),
        ({"workers": 1, "grace": -1}, "grace=-1"),
        ({"workers": 1, "threads": 0}, "threads=0"),
        ({"workers": 1, "heartbeat_timeout": -2}, "heartbeat_timeout=-2"),
    ],
)
def test_numbers_that_cannot_be_meant(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        spawn(print, **options)


def test_an_exception_in_the_caller_stops_the_workers() -> None:
    def work() -> None:
        worker.send({})
        time.sleep(60)

    def refuse(rank: int, message: Any) -> None:
        raise KeyboardInterrupt

    before = set(children(os.getpid()))  # other files' tests may have left some to themselves
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        spawn(work, workers=2, on_message=refuse)
    assert time.monotonic() - started < patience(15)
    assert set(children(os.getpid())) <= before


def test_from_another_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(spawn(rank, workers=2)))
    thread.start()
    thread.join(60)
    assert results == [0, 1]


# Ways to run the same text, none with a guard. The body says how often it runs.
BODY = """
import os
with open("ran", "a") as file: file.write("x")
from dataclasses import dataclass
from allhands.launch import spawn
@dataclass
class Point:
    x: int
def scale(point):
    return Point(point.x * 2)
def work(point):
    assert isinstance(point, Point)
    return scale(point).x + int(os.environ["RANK"])
print(spawn(work, (Point(5),), workers=2))
"""


# rare: ways in which a script is seldom started.
@pytest.mark.parametrize(
    "way",
    [
        "script",
        pytest.param("-c", marks=pytest.mark.rare),
        pytest.param("stdin", marks=pytest.mark.rare),
    ],
)
def test_from_text_without_a_guard(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BODY)
    words = {"script": ["script.py"], "-c": ["-c", BODY], "stdin": ["-"]}[way]
    done = subprocess.run(
        [sys.executable, *words], input=BODY, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[10, 11]\n", "")
    assert (tmp_path / "ran").read_text() == "x"


# rare: a training in a notebook (runner/test_notebook.py) calls spawn too.
@pytest.mark.rare
def test_from_a_notebook(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [
        BODY.replace("print(spawn", "print('out', spawn"),
        "print(spawn(lambda: print('from a worker'), workers=1))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert text == "out [10, 11]\n[0] from a worker\n[None]\n"
    assert (tmp_path / "ran").read_text() == "x"


def test_the_caller_is_killed(job: Any) -> None:
    script = job.script(
        "import subprocess, time\nfrom allhands.launch import spawn\n"
        "def work():\n    subprocess.Popen(['sleep', '300']); print('up', flush=True); "
        "time.sleep(300)\n"
        "spawn(work, workers=2)"
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, cwd=job.folder)
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == [b"[0] up\n", b"[1] up\n"]
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + patience(5)
    while job.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert job.alive() == []


def test_torch_is_not_imported_for_plain_results(tmp_path: Path) -> None:
    text = (
        "import sys\nfrom allhands.launch import spawn\nvalue = {'a': [1, 2.5, None, 'x']}\n"
        "assert spawn(lambda: value, workers=1) == [value]\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", text], cwd=tmp_path, check=True)


# rare: it is about time alone.
@pytest.mark.rare
def test_workers_do_not_import_what_only_their_caller_needs(tmp_path: Path) -> None:
    # In a process of its own: the workers of this one get what other test modules hold.
    text = (
        "import sys, torch._dynamo\nfrom allhands.launch import spawn\n"
        "names = ['torch', 'torch._dynamo', 'torch._inductor', 'torchmetrics']\n"
        "print(spawn(lambda: [name in sys.modules for name in names], workers=1))"
    )
    said = subprocess.check_output([sys.executable, "-c", text], cwd=tmp_path, text=True)
    assert said == "[[True, False, False, False]]\n"


def test_a_killed_caller_leaves_nothing_in_shared_memory(job: Any) -> None:
    script = job.script(
        "import time, torch\nfrom allhands.launch import ship, spawn\nmake = ship.make_directory\n"
        "def make_and_tell(nbytes=0):\n    folder = make(nbytes); print(folder, flush=True); "
        "return folder\n"
        "ship.make_directory = make_and_tell\n"
        "def work(data):\n    print('up', flush=True); time.sleep(300)\n"
        "spawn(work, (torch.zeros(100),), workers=1)"
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, cwd=job.folder)
    assert process.stdout is not None
    folders = [Path(process.stdout.readline().decode().strip()) for _ in range(2)]
    assert process.stdout.readline() == b"[0] up\n"
    assert all(folder.is_dir() for folder in folders)
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + patience(5)
    while any(folder.exists() for folder in folders) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(folder.exists() for folder in folders)


def test_variables_that_python_reads_at_its_start() -> None:
    assert spawn(lambda: hash("x"), workers=1, env={"PYTHONHASHSEED": "1"}) == [
        int(
            subprocess.check_output(
                [sys.executable, "-c", "print(hash('x'))"], env={"PYTHONHASHSEED": "1"}
            )
        )
    ]


def _with_exit_work(path: str) -> int:
    import atexit
    import threading
    import time
    from pathlib import Path

    atexit.register(Path(path, "atexit").touch)
    threading.Thread(target=lambda: (time.sleep(0.3), Path(path, "thread").touch())).start()
    return 7


@pytest.mark.serial
def test_exit_handlers_and_threads_of_a_function_are_finished(tmp_path: Any) -> None:
    assert spawn(_with_exit_work, (str(tmp_path),), workers=1) == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atexit", "thread"]


@pytest.mark.usefixtures("fake_servers")
def test_servers_serve_while_the_workers_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(count: int) -> Any:
        return (
            told_servers(count),
            os.environ["ALLHANDS_TOKEN"],
            os.environ["ALLHANDS_NUM_SERVERS"],
            os.getppid(),
        )

    def kill(count: int) -> None:
        os.kill(told_servers(count)[-1]["pid"], 9)
        time.sleep(30)

    with idle_agents.kept(30):
        first, second = (spawn(work, (2 * number,), workers=2, servers=2) for number in (1, 2))
        failed = pytest.raises(
            WorkerError, match=r"^server [01] \(.* failed first: killed by SIGKILL"
        )
        with failed as caught:
            spawn(kill, (6,), workers=1, servers=2)
    assert (caught.value.rank, caught.value.exit_code) == (None, 137)
    for result, mine in ((first, slice(0, 2)), (second, slice(2, 4))):
        (servers, token, number, agent), other = result
        assert other[1:] == (token, number, agent), "one secret a job"
        assert len(token) == 64
        assert {(one["ALLHANDS_TOKEN"], one["parent"]) for one in servers[mine]} == {(token, agent)}
        assert sorted(one["ALLHANDS_SERVER"] for one in servers[mine]) == ["0", "1"]
        assert number == servers[0]["ALLHANDS_NUM_SERVERS"] == "2"
        assert not any(Path(f"/proc/{one['pid']}").exists() for one in servers), (
            "none outlives its call"
        )
    assert first[0][1] != second[0][1]
    assert first[0][3] == second[0][3], "the agent that waits forks servers as well"
    out = capfd.readouterr().out
    assert out.count("[server 0] serving\n") == out.count("[server 1] serving\n") == 3
    assert not any(token in out for token in (first[0][1], second[0][1]))
    with pytest.raises(UserError, match=r"^servers=-1; it must be a whole number of at least 0$"):
        spawn(rank, workers=1, servers=-1)

"""Half-written checkpoints: killed in the middle of a save, slow disks, damaged files."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import allhands
from allhands import Callback, SupervisedRunner
from allhands.launch import spawn
from allhands.loop import checkpoint
from allhands.loop.checkpoint.storage import Writer
from tests.runner.problems import arguments
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]

KILLS = 50


# ---------------------------------------------------------------------- killed


def save_for_ever(folder: Path, rank: int, workers: int, started: int) -> None:
    world = allhands.init(
        device="cpu",
        init_method=f"file://{folder}-meeting",
        rank=rank,
        world_size=workers,
        timeout=60,
    )
    saver = checkpoint.Saver(folder, world)
    for epoch in range(1, 100_000):
        state = {
            "weights": torch.full((100_000,), float(epoch)),
            "more": torch.full((50_000,), -float(epoch)),
            "epoch": epoch,
        }
        saver.save(
            state,
            {"mine": torch.full((1000,), float(epoch + rank))},
            {"epoch": epoch},
            None,
            epoch % 3 == 0,
        )
        saver.wait()
        os.write(started, b".")


def kill_many_times(folder: str) -> None:
    """Run in a process of its own. Half of the trials with one process, half with two of which one
    is killed."""
    import torch.distributed.checkpoint

    torch.set_num_threads(1)
    chance = random.Random(0)
    for trial in range(KILLS):
        path, workers = Path(folder) / str(trial), 1 + trial % 2
        reports, started = os.pipe()
        children = []
        for rank in range(workers):
            child = os.fork()
            if child == 0:
                try:
                    save_for_ever(path, rank, workers, started)
                except BaseException:
                    if workers == 1:
                        traceback.print_exc()
                finally:
                    os._exit(1)
            children.append(child)
        os.close(started)
        os.read(reports, 1)  # at least one is whole
        time.sleep(chance.random() * 0.06)
        os.kill(children[chance.randrange(workers)], signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        whole = 1
        while data := os.read(reports, 65536):
            whole += len(data) // workers
        found = checkpoint.newest(path)
        assert found is not None
        newest, state, passed_over = found
        epoch = state["epoch"]
        assert not passed_over, passed_over
        assert epoch >= whole // workers, (epoch, whole)
        assert torch.equal(state["weights"], torch.full((100_000,), float(epoch)))
        assert torch.equal(state["more"], torch.full((50_000,), -float(epoch)))
        for rank in range(workers):
            assert torch.equal(
                checkpoint.load_own(newest, rank)["mine"], torch.full((1000,), float(epoch + rank))
            )
        left = sum(entry.name.startswith(".epoch") for entry in path.iterdir())
        print("killed", trial, epoch, left, flush=True)


@pytest.mark.slow
def test_killed_50_times_in_the_middle_of_a_save_the_newest_whole_one_always_loads(
    tmp_path: Path,
) -> None:
    code = (
        "from tests.faults.test_half_written import kill_many_times; "
        f"kill_many_times({str(tmp_path)!r})"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("killed")]
    assert len(lines) == KILLS, done.stdout[-500:] + done.stderr[-4000:]
    # That they were killed in the middle is seen by what they left half written (a rank 0 that
    # survives tidies up).
    assert sum(int(line[3]) > 0 for line in lines) > KILLS // 5


# --------------------------------------------------------------------- slow, full and damaged disks


class SlowDisk(Callback):
    """Rank 0's disk takes longer than the ranks wait for one another in a collective."""

    def on_train_start(self, training: Any) -> None:
        original = Writer.finish

        def finish(self: Any, metadata: Any, results: Any) -> None:
            time.sleep(4.0)
            original(self, metadata, results)

        Writer.finish = finish  # type: ignore[method-assign]


def train_on_slow_disk(logdir: str) -> Any:
    given = arguments(num_epochs=1, logdir=logdir, callbacks=[SlowDisk()])
    return SupervisedRunner(device="cpu").train(**given)["epoch"]


def in_a_world_that_waits_two_seconds(logdir: str) -> Any:
    allhands.init(device="cpu", timeout=2.0)
    return train_on_slow_disk(logdir)


def test_a_disk_slower_than_the_groups_timeout_is_no_failure(tmp_path: Path) -> None:
    assert spawn(in_a_world_that_waits_two_seconds, (str(tmp_path),), workers=2) == [[1], [1]]
    assert allhands.load_checkpoint(tmp_path)["epoch"] == 1


def full_disk(logdir: str) -> str:
    world = allhands.current_world()
    assert world is not None
    saver = checkpoint.Saver(Path(logdir), world)
    state = {"weights": torch.ones(1000), "more": torch.ones(1000)}
    saver.save(state, {}, {"epoch": 1}, None, False)
    saver.wait()
    if world.rank == 1:
        Writer.write_data = _no_space  # type: ignore[method-assign, assignment]
    saver.save(state, {}, {"epoch": 2}, None, False)
    try:
        saver.wait()
    except OSError as error:
        return str(error)
    return "no error"


def _no_space(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_of_one_rank_is_told_on_all_and_leaves_the_earlier_checkpoint(
    tmp_path: Path,
) -> None:
    for said in in_world(2, full_disk, str(tmp_path)):
        assert (
            "the checkpoint epoch-0002 could not be written on rank 1; earlier ones are untouched: "
            "No space left" in said
        )
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found[0].name == "epoch-0001"
    assert not list(tmp_path.glob(".epoch*"))


# rare on 1 and 3: 2 have several files, of which one is damaged.
@pytest.mark.parametrize(
    "workers",
    [pytest.param(1, marks=pytest.mark.rare), 2, pytest.param(3, marks=pytest.mark.rare)],
)
def test_a_flipped_byte_is_refused_by_file_name_and_the_one_before_is_used(
    tmp_path: Path, workers: int
) -> None:
    train = SupervisedRunner(device="cpu").train
    given = arguments(num_epochs=2, logdir=tmp_path, distributed=True, workers=workers)
    data = given["loaders"]["train"].dataset
    given["loaders"]["train"] = DataLoader(data, 8 // workers, shuffle=True)
    train(**given)
    path = tmp_path / "checkpoints" / "epoch-0002" / f"__{workers - 1}_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(
        allhands.UserError,
        match=rf"{path.name} does not match its checksum.*others there: epoch-0001",
    ):
        allhands.load_checkpoint(path.parent)
    history = train(**{**given, "num_epochs": 3, "resume": "auto"})
    assert history["epoch"] == [1, 2, 3]
    assert allhands.load_checkpoint(tmp_path)["epoch"] == 3

"""Who runs a job: this process, the world that it is part of, or workers that are started for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import allhands
from allhands.comm import calls
from allhands.errors import UserError, WorldError
from allhands.launch import spawn, worker
from allhands.launch.processes import cores
from allhands.runner.reporter import ConsoleReporter, ForwardingReporter, Reporter, replay
from allhands.strategies import DDP, Single, Strategy, strategy_named
from allhands.world import World, current_world, detect

# Seconds that workers have for a last checkpoint, once they are asked to leave.
SAVE_GRACE = 30.0

# (runner, what to do, world, reporter, whether the objects were sent here) -> result of plain data
Job = Callable[..., Any]


@dataclass
class Plan:
    """How many processes run a job, and with which strategy.

    `count` workers are started; 0 runs the job in this process, as part of the world that it is in.
    """

    strategy: Strategy
    count: int
    device: str | None

    def run(self, job: Job, runner: Any, given: Any, verbose: bool = False, preload: Sequence[str] = ()) -> Any:
        """The job's result; rank 0's where workers were started, which then have the modules `preload` imported already.

        Raises:
            WorkerError: a worker failed.
        """
        if self.count == 0:
            alone = current_world()
            if alone is not None and alone.environment == "alone":
                allhands.finalize()  # an earlier job may have used another device
            world = allhands.init(device=self.device)
            self.strategy.check(world)
            return _run_here(job, runner, given, world, verbose)
        console = ConsoleReporter(verbose)
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            results = spawn(
                _in_worker, (job, runner, given, self.strategy, device, console.shows_bar), workers=self.count,
                on_message=lambda rank, message: replay(message, console), preload=preload, grace=SAVE_GRACE,
            )  # fmt: skip
        finally:
            console.close()
        return results[0]


def plan(distributed: bool | str | Strategy, count: int | None, device: str | None) -> Plan:
    """Decide who runs a job.

    Raises:
        UserError: `distributed` or `count` cannot be honoured here.
    """
    strategy = _strategy(distributed)
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise UserError(f"workers={count!r}; it must be a whole number of at least 1")
    around = world_around()
    if around:
        if count is not None and count != around:
            raise UserError(
                f"workers={count}, but this process is one of a world of {around} that was started already; remove workers=, or "
                "start the script alone"
            )
        return Plan(strategy or DDP(), 0, device)
    if strategy is None or isinstance(strategy, Single) or strategy.name == "dp":
        if count not in (None, 1):
            chosen = "distributed=False" if strategy is None else f"distributed={strategy.name!r}"
            raise UserError(f"workers={count} with {chosen}, which is one process; write distributed=True (or 'ddp')")
        return Plan(strategy or Single(), 0, device)
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if count is None:
        count = gpus or cores()
    elif gpus and count > gpus:
        raise UserError(
            f"workers={count}, but this machine shows {gpus} GPU{'s' if gpus > 1 else ''} and each worker drives one; write "
            f"workers={gpus}, or SupervisedRunner(device='cpu') to train on CPU cores"
        )
    return Plan(strategy, count, device)


def _strategy(distributed: bool | str | Strategy) -> Strategy | None:
    if distributed is None or distributed is False:
        return None
    if distributed is True:
        return DDP()
    if isinstance(distributed, Strategy):
        return distributed
    if isinstance(distributed, str):
        return strategy_named(distributed)
    if isinstance(distributed, type) and issubclass(distributed, Strategy):
        raise UserError(f"distributed={distributed.__name__} is a class; write distributed={distributed.__name__}()")
    raise UserError(f"distributed={distributed!r}; write True, False, the name of a strategy, or a Strategy such as DDP()")


def world_around() -> int:
    """The size of the world that this process is in, or was started for; 0 when it is alone.

    A world of one that a launcher started is joined as it is. A single Slurm task or MPI process is not: it may start one
    worker a GPU.
    """
    world = current_world()
    if world is not None:
        return 0 if world.environment == "alone" else world.world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    layout = detect()
    if layout is not None:
        return layout.world_size
    return 1 if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else 0


def _run_here(job: Job, runner: Any, given: Any, world: World, verbose: bool) -> Any:
    reporter = ConsoleReporter(verbose) if world.rank == 0 else Reporter()
    return _guarded(job, runner, given, world, reporter, False)


def _in_worker(job: Job, runner: Any, given: Any, strategy: Strategy, device: str, shows_bar: bool) -> Any:
    world = allhands.init(device=device)
    strategy.check(world)
    reporter = ForwardingReporter(shows_bar) if world.rank == 0 else Reporter()
    result = _guarded(job, runner, given, world, reporter, True)
    # Not after an error: taking nccl down can wait for the others, and the error is to be told at once.
    allhands.finalize()
    return result if world.rank == 0 else None


def _guarded(job: Job, runner: Any, given: Any, world: World, reporter: Reporter, shipped: bool) -> Any:
    """Run the job; a rank that leaves with exit code 0 in the middle would leave the others waiting without a reason."""
    try:
        # A rank that calls something alone would leave all of them waiting without a word.
        with calls.watch(world, worker.fail):
            return job(runner, given, world, reporter, shipped)
    except SystemExit as error:
        if world.world_size > 1 and error.code in (None, 0):
            raise WorldError(
                f"rank {world.rank} called sys.exit() with code 0 in the middle of a job that {world.world_size} ranks run "
                "together; raise an exception, or stop all ranks with training.stop()"
            ) from error
        raise

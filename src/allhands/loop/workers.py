"""Who runs a job: this process, the world that it is part of, or workers that are started for
it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allhands.checks import check_whole
from allhands.comm import calls, hook_calls
from allhands.errors import UserError, WorldError
from allhands.launch import spawn, worker
from allhands.launch.rendezvous import Rendezvous, gather
from allhands.loop.reporter import ForwardingReporter, Reporter, replay
from allhands.loop.reporter_choice import console, reporter_of
from allhands.strategies import DDP, Single, Strategy, strategy_named
from allhands.world import Layout, World, current_world, detect, finalize, init, slurm
from allhands.world.cores import cores
from allhands.world.regroup import began_with

# Seconds that workers have for a last checkpoint, once they are asked to leave.
SAVE_GRACE = 30.0

# They take a second or two to import. Where this process has them (any optimizer of torch imports
# the first), workers will need them, and get them from the process that they are forked from, once
# for all.
SLOW_IMPORTS = ("torch._dynamo", "torchmetrics")

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
    # The tasks of other nodes that start their part of the workers.
    rendezvous: Rendezvous | None = None

    @property
    def world_size(self) -> int:
        """How many processes take part."""
        if self.rendezvous is not None:
            return sum(self.rendezvous.counts)
        return self.count or world_around() or 1

    def run(
        self,
        job: Job,
        runner: Any,
        given: Any,
        verbose: bool = False,
        preload: Sequence[str] = (),
        hands_back: bool = False,
    ) -> Any:
        """The job's result; that of this node's first worker where workers were started, which then
        have the modules `preload` imported already. `hands_back`: the job stops at SIGINT, with
        which a Ctrl-C reaches it.

        Raises:
            WorkerError: a worker failed.
        """
        if self.count == 0:
            hook_calls.together(f"SupervisedRunner.{job.__name__.strip('_')}()")
            before = current_world()
            if before is not None and before.environment == "alone":
                finalize()  # it may be on another device than this job
            world = init(device=self.device)
            try:
                self.strategy.check(world)
                return _run_here(job, runner, given, world, verbose)
            finally:
                if before is None and world.environment == "alone":
                    # the caller has made no world and need not know of this one
                    finalize()
        printer = console(verbose)
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            results = spawn(
                _in_worker,
                (job, runner, given, self.strategy, device, printer.shows_bar),
                workers=self.count,
                on_message=lambda rank, message: replay(message, printer),
                grace=SAVE_GRACE,
                rendezvous=self.rendezvous,
                preload=[*preload, *(name for name in SLOW_IMPORTS if name in sys.modules)],
                servers=self.strategy.servers_to_start(),
                hands_back=hands_back,
            )
        finally:
            printer.close()
        return results[0]


def plan(distributed: bool | str | Strategy, count: int | None, device: str | None) -> Plan:
    """Decide who runs a job.

    Raises:
        UserError: `distributed` or `count` cannot be honoured here.
    """
    strategy = strategy_from(distributed)
    check_whole("workers", count, otherwise="None")
    if strategy is not None and strategy.name not in ("single", "dp"):
        task = node_task()
        if task is not None:
            count, rendezvous = gather_nodes(task, count, device)
            return Plan(strategy, 0 if rendezvous is None else count, device, rendezvous)
    around = world_around()
    if strategy is not None and around:
        strategy.check_size(around)
    if around:
        if count is not None and count != around:
            raise UserError(
                f"workers={count}, but this process is one of a world of {around} that was started "
                "already; remove workers=, or start the script alone"
            )
        return Plan(strategy or DDP(), 0, device)
    if strategy is None or isinstance(strategy, Single) or strategy.name == "dp":
        if count not in (None, 1):
            chosen = "distributed=False" if strategy is None else f"distributed={strategy.name!r}"
            raise UserError(
                f"workers={count} with {chosen}, which is one process; write distributed=True (or "
                "'ddp')"
            )
        return Plan(strategy or Single(), 0, device)
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if count is None:
        count = strategy.size_wanted() or gpus or cores()
    if too_many := _more_than_gpus(count, gpus):
        raise UserError(too_many)
    strategy.check_size(count)
    strategy.servers_to_start()  # refuses now what it would refuse when workers start
    return Plan(strategy, count, device)


def _more_than_gpus(count: int, gpus: int) -> str | None:
    if not gpus or count <= gpus:
        return None
    return (
        f"workers={count}, but this machine shows {gpus} GPU{'s' if gpus > 1 else ''} and each "
        "worker drives one; write "
        f"workers={gpus}, or SupervisedRunner(device='cpu') to train on CPU cores"
    )


def node_task() -> Layout | None:
    """The layout of the step when srun started one task on each of several nodes, which may start
    the workers there."""
    if current_world() is not None or (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    ):
        return None
    return slurm.node_task(os.environ)


def gather_nodes(
    task: Layout, count: int | None, device: str | None
) -> tuple[int, Rendezvous | None]:
    """How many workers this node starts, and the tasks of the other nodes; to be called on all of
    them.

    No rendezvous when every node has one: then the tasks are the workers.

    Args:
        task: what `node_task` gave.
        count: workers a node; None takes one a GPU, and one without GPUs.
        device: "cpu" leaves GPUs alone.
    """
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    here = count if count is not None else gpus or 1
    meeting = slurm.meeting_of_nodes(os.environ, task)
    assert task.node_rank is not None
    assert meeting.job_key is not None
    rendezvous = gather(
        task.node_rank, meeting.hosts, meeting.job_key, here, _more_than_gpus(here, gpus)
    )
    alone = set(rendezvous.counts) == {1}
    if rendezvous.node == 0:
        each = (
            "one worker each"
            if alone
            else "workers " + ", ".join(map("{} on {}".format, rendezvous.counts, rendezvous.hosts))
        )
        if alone and count is None and not gpus:
            hint = "; no GPU is seen, workers=N starts N on each node"
        else:
            hint = ""
        print(
            f"allhands: srun started one task on each of {len(rendezvous.counts)} nodes: "
            f"{each}{hint}",
            flush=True,
        )
    if alone:
        rendezvous.close()
        return 1, None
    return here, rendezvous


def strategy_for(strategy: str | Strategy | None, world: World) -> Strategy:
    """The strategy of a training in a world that is there; None is "ddp" with several workers, or
    where others may join.

    Raises:
        UserError: it cannot run in this world.
    """
    several = world.world_size > 1 or began_with() is not None
    chosen = strategy_from(strategy) or (DDP() if several else Single())
    chosen.check_size(world.world_size)
    chosen.check(world)
    return chosen


def strategy_from(distributed: bool | str | Strategy | None) -> Strategy | None:
    if distributed is None or distributed is False:
        return None
    if distributed is True:
        return DDP()
    if isinstance(distributed, Strategy):
        return distributed
    if isinstance(distributed, str):
        return strategy_named(distributed)
    if isinstance(distributed, type) and issubclass(distributed, Strategy):
        raise UserError(
            f"distributed={distributed.__name__} is a class; write "
            f"distributed={distributed.__name__}()"
        )
    raise UserError(
        f"distributed={distributed!r}; write True, False, the name of a strategy, or a Strategy "
        "such as DDP()"
    )


def world_around() -> int:
    """The size of the world that this process is in, or was started for; 0 when it is alone.

    A world of one that a launcher started is joined as it is. A single Slurm task or MPI process is
    not: it may start one worker a GPU.
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
    reporter = reporter_of(world, lambda: console(verbose))
    return _guarded(job, runner, given, world, reporter, False)


def _in_worker(
    job: Job, runner: Any, given: Any, strategy: Strategy, device: str, shows_bar: bool
) -> Any:
    world = init(device=device)
    strategy.check(world)
    reporter = reporter_of(world, lambda: ForwardingReporter(shows_bar))
    result = _guarded(job, runner, given, world, reporter, True)
    # Not after an error: taking nccl down can wait for the others, and the error is to be told at
    # once.
    finalize()
    return result if world.local_rank == 0 else None


def _guarded(
    job: Job, runner: Any, given: Any, world: World, reporter: Reporter, shipped: bool
) -> Any:
    """Run the job; a rank that leaves with exit code 0 in the middle would leave the others waiting
    without a reason."""
    try:
        # A rank that calls something alone would leave all of them waiting without a word.
        with calls.watch(world, worker.fail):
            return job(runner, given, world, reporter, shipped)
    except SystemExit as error:
        if world.world_size > 1 and error.code in (None, 0):
            raise WorldError(
                f"rank {world.rank} called sys.exit() with code 0 in the middle of a job that "
                f"{world.world_size} ranks run "
                "together; raise an exception, or stop all ranks with training.stop()"
            ) from error
        raise

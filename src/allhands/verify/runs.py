"""The runs that are compared: the user's training, distributed or alone, whole or with one thing
changed."""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from allhands.data import Feed, Source, map_tensors
from allhands.errors import UserError, WorldError
from allhands.launch import ship
from allhands.launch.unpicklable import explain
from allhands.loop.reporter import Reporter
from allhands.loop.settings import Data
from allhands.loop.workers import Plan, plan
from allhands.runner.train_settings import TrainSettings
from allhands.runner.training import Training
from allhands.strategies import Single, Strategy
from allhands.verify.recorder import Recorder, Step, tensors_of
from allhands.world import World

_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention)


@dataclass
class Variation:
    """What is different in one run of the user's training.

    Attributes:
        steps: optimizer steps to take.
        alone_for: train in one process, on the global batches of so many workers; 0 leaves the
            batches as they are.
        cut: alone, cut each global batch in so many micro-batches.
        reverse: take the samples of each global batch in reverse order.
        double: weights and inputs in float64, without autocast.
        frozen: modules that stay in evaluation mode: "batchnorm", "dropout", "all" or "".
        drop_last: leave out a last global batch that is short.
    """

    steps: int
    alone_for: int = 0
    cut: int = 1
    reverse: bool = False
    double: bool = False
    frozen: str = ""
    drop_last: bool = False


@dataclass
class Trace:
    """What a run did; made of plain data.

    Attributes:
        steps: see `Recorder`.
        orders: a checksum of the order of each epoch, by loader and epoch.
        failure: the `WorldError` that ended the run early, or "".
        unwrapped: the module that the strategy gave to call was never called.
    """

    steps: list[Step]
    orders: dict[str, int] = field(default_factory=dict)
    failure: str = ""
    unwrapped: bool = False


class GlobalBatches(Data):
    """The user's data in the global batches of `workers` workers, for one process.

    Batches of the user's own batch sampler cannot be made larger; they are accumulated instead (see
    `accumulate_for`).
    """

    def __init__(self, data: Data, variation: Variation, accumulate: int, evaluates: bool) -> None:
        super().__init__(data.loaders, data.datasets, data.same_everywhere)
        self.variation, self.accumulate, self.evaluates = variation, accumulate, evaluates

    def sources(self, seed: int) -> dict[str, Source]:
        sources = super().sources(seed)
        variation = self.variation
        trained = [source for source in sources.values() if source.trains]
        if variation.drop_last:
            for source in trained:
                source.drop_last = True
        if variation.alone_for and not _batches_are_made(trained):
            for source in trained:
                if source.batch_size is not None:  # what is wrong with None, the feed says
                    source.batch_size = (
                        source.batch_size * variation.alone_for * self.accumulate // variation.cut
                    )
        return sources if self.evaluates else {source.name: source for source in trained}


def _batches_are_made(trained: list[Source]) -> bool:
    return any(source.batch_sampler is not None for source in trained)


class Runs:
    """The user's objects, and the folder through which they and the reference runs reach every
    process.

    The objects are written once and read anew for every run, here and in the workers, as `train`
    sends them to workers: a run leaves no trace in the user's own objects nor in another run.

    Args:
        objects: what `verify` was given: runner, model, criterion, optimizer, scheduler, data,
            seed, accumulate, clip_norm, precision.
        device: "cpu", "cuda" or None, as for `SupervisedRunner`.
    """

    def __init__(self, objects: dict[str, Any], device: str | None) -> None:
        self.device = device
        self._folders: list[str] = []
        try:
            self.path = ship.dump(objects, self._folder)
        except (UserError, OSError):
            raise
        except Exception as error:
            raise explain(error, objects) from None

    def _folder(self, nbytes: int) -> str:
        self._folders.append(ship.make_directory(nbytes))
        return self._folders[-1]

    def close(self) -> None:
        """Remove the files."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def reference(self, variation: Variation) -> tuple[str, Trace]:
        """Run alone and keep every tensor; the path of the file that holds them, and the run."""
        trace = self.alone(variation, keep=True)
        path = ship.dump(trace.steps, self._folder)
        for step in trace.steps:
            for key in ("gradients", "parameters", "buffers"):
                del step[key]
        return path, trace

    def forget(self, path: str) -> None:
        """Remove a reference."""
        for folder in [folder for folder in self._folders if path.startswith(folder)]:
            shutil.rmtree(folder, ignore_errors=True)
            self._folders.remove(folder)

    def alone(
        self, variation: Variation, reference: str | None = None, keep: bool = False
    ) -> Trace:
        """Run in this process."""
        here = Plan(Single(), 0, self.device)
        (trace,) = here.run(
            perform, None, (self.path, Single(), [(asdict(variation), reference)], keep)
        )
        return Trace(**trace)

    def distributed(
        self, strategy: Strategy, workers: int, wanted: list[tuple[Variation, str]]
    ) -> list[Trace]:
        """Run in `workers` new processes, one run after another, each against its reference.

        Raises:
            UserError: the strategy cannot run so.
            WorkerError: a worker failed.
        """
        given = (
            self.path,
            strategy,
            [(asdict(variation), reference) for variation, reference in wanted],
            False,
        )
        return [
            Trace(**trace)
            for trace in plan(strategy, workers, self.device).run(perform, None, given)
        ]


def perform(
    runner: None, given: Any, world: World, reporter: Reporter, shipped: bool
) -> list[dict[str, Any]]:
    """A job for `Plan.run`: trains once for each variation; what each did, as plain data."""
    path, strategy, wanted, keep = given
    return [
        vars(
            _train(
                ship.load(path),
                copy.deepcopy(strategy),
                Variation(**variation),
                reference,
                keep,
                world,
            )
        )
        for variation, reference in wanted
    ]


def _train(
    objects: dict[str, Any],
    strategy: Strategy,
    variation: Variation,
    reference: str | None,
    keep: bool,
    world: World,
) -> Trace:
    # The other ranks hold the same weights, or `apart` says so; their distance need not be measured
    # too.
    recorder = Recorder(
        variation.steps, ship.load(reference) if reference and world.rank == 0 else None, keep
    )
    settings = _settings(objects, strategy, variation, recorder)
    _freeze(settings.model, variation.frozen)
    runner = objects["runner"]
    if variation.double:
        settings.model.double()
        if isinstance(settings.criterion, nn.Module):
            settings.criterion.double()
    training = Training(runner, settings, world, Reporter())
    trace = Trace(recorder.steps)
    for feed in training.loop.trained:
        _watch_order(feed, trace.orders, variation.reverse)
    if variation.double:
        handle_batch = training.forward.handle_batch
        training.forward.handle_batch = lambda model, batch: handle_batch(model, _double(batch))
    try:
        training.run()
    except WorldError as error:
        trace.failure = str(error)
    if not recorder.steps:
        raise UserError(
            "the training takes no optimizer step: the data holds fewer samples than one global "
            "batch, and drop_last=True leaves "
            "a short one out; write drop_last=False, or a smaller batch_size"
        )
    trace.unwrapped = recorder.wraps and recorder.calls == 0
    return trace


def _settings(
    objects: dict[str, Any], strategy: Strategy, variation: Variation, recorder: Recorder
) -> TrainSettings:
    accumulate = objects["accumulate"]
    scheduler = (
        objects["scheduler"][0] if isinstance(objects["scheduler"], tuple) else objects["scheduler"]
    )
    # Other loaders do not change the training, unless the learning rate follows what they measure.
    evaluates = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    data = GlobalBatches(objects["data"], variation, accumulate, evaluates)
    data.same_everywhere = True  # every process reads the one file
    if variation.alone_for:
        made = _batches_are_made(
            [source for source in data.sources(objects["seed"]).values() if source.trains]
        )
        accumulate = variation.alone_for * accumulate if made else variation.cut
    return TrainSettings(
        model=objects["model"],
        criterion=objects["criterion"],
        optimizer=objects["optimizer"],
        scheduler=objects["scheduler"],
        data=data,
        metrics={},
        callbacks=[recorder],
        logdir=None,
        num_epochs=variation.steps,
        steps_per_epoch=objects["steps_per_epoch"],
        evaluate_every=objects["evaluate_every"] if evaluates else None,
        valid_loader=None,
        main_metric="loss",
        minimize_metric=True,
        verbose=False,
        resume=None,
        seed=objects["seed"],
        accumulate=accumulate,
        clip_norm=objects["clip_norm"],
        precision="fp32" if variation.double else objects["precision"],
        check=False,
        overfit=False,
        load_best_on_end=False,
        log_every=variation.steps,
        cut_short=True,
        strategy=strategy,
    )


def settings_to_check(objects: dict[str, Any], steps: int) -> TrainSettings:
    """The user's training as it is, for `TrainSettings.validate`."""
    return _settings(objects, Single(), Variation(steps), Recorder(steps))


def smallest_cut(objects: dict[str, Any], workers: int) -> int:
    """Into how many equal micro-batches every global batch can be cut, at least 2; 1 when it cannot
    be."""
    trained = [
        source for source in objects["data"].sources(objects["seed"]).values() if source.trains
    ]
    if _batches_are_made(trained) or not trained:
        return 1
    common = math.gcd(
        *(int(source.batch_size or 1) * workers * objects["accumulate"] for source in trained)
    )
    # One sample in a micro-batch is more than another order of summation: BatchNorm refuses it.
    return next((number for number in range(2, common // 2 + 1) if common % number == 0), 1)


def frozen_modules(model: nn.Module, kind: str) -> list[tuple[str, nn.Module]]:
    """The modules that `Variation.frozen` = `kind` leaves in evaluation mode, by name."""
    found = []
    for name, module in model.named_modules():
        if kind == "dropout":
            drops = isinstance(module, _DROPOUTS) and bool(
                getattr(module, "p", getattr(module, "dropout", 0))
            )
            if drops:
                found.append((name, module))
        elif kind == "all" or isinstance(module, nn.modules.batchnorm._BatchNorm):
            found.append((name, module))
    return found


def _freeze(model: nn.Module, kind: str) -> None:
    for _, module in frozen_modules(model, kind) if kind else ():
        module.eval()
        module.train = _Stays(module)  # type: ignore[method-assign]


class _Stays:
    """In place of a module's ``train``: changes nothing."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, mode: bool = True) -> nn.Module:
        return self.module


def _watch_order(feed: Feed, orders: dict[str, int], reverse: bool) -> None:
    """Note a checksum of each epoch's order; with `reverse`, turn round the samples of each global
    batch."""
    order = feed.order
    if order is None:
        return  # a stream has no order that could be looked at
    name = "batches" if hasattr(order, "batches") else "indices"
    draw: Callable[[int], Any] = getattr(order, name)

    def drawn(epoch: int) -> Any:
        items = draw(epoch)
        plain = items.tolist() if isinstance(items, torch.Tensor) else items
        orders.setdefault(f"{feed.name}/{epoch}", zlib.crc32(repr(plain).encode()))
        if not reverse:
            return items
        if name == "batches":
            return [batch[::-1] for batch in items]
        return torch.cat([block.flip(0) for block in items.split(feed.global_batch)])

    setattr(order, name, drawn)


def _double(value: Any) -> Any:
    return map_tensors(value, lambda t: t.double() if t.is_floating_point() else t)


@contextlib.contextmanager
def leaves_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit inside, where it would have ended this process at once and left its
    files behind."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    # Python handles signals in the main thread only, and a handler of the user's own stays.
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def bytes_of(model: nn.Module) -> int:
    """The size of the parameters that are trained, in bytes."""
    return sum(
        p.numel() * p.element_size()
        for p in tensors_of(list(model.parameters()))
        if p.requires_grad
    )

"""What Catalyst's runners show of a training, and one batch of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.catalyst.callback import BatchHooks, Callback, has_hook
from allhands.catalyst.step_engine import BatchEngine, SteppingOptimizer
from allhands.errors import UserError
from allhands.loop.step_function import Rows
from allhands.runner.callbacks import call_hook
from allhands.runner.handed_back import gather
from allhands.step.modes import evaluation_mode
from allhands.world import World

if TYPE_CHECKING:
    from allhands.catalyst.hand_steps import HandSteps
    from allhands.catalyst.loader_means import LoaderMeans


class BatchCallback(Callback):
    """A callback that is part of the computation of a batch: it is called for batches too that
    count for nothing, so that all workers make the same calls."""


class BatchRunner(BatchHooks):
    """The attributes and the hooks of Catalyst's runners.

    Attributes:
        model, criterion, optimizer, scheduler: what `train` was given; while it runs, the modules
            to call, and optimizers whose ``step()`` takes the step of all workers.
        engine: has the ``device``, and ``backward(loss)``.
        batch: what the loader gave, or what `handle_batch` has made of it.
        batch_metrics: means over the samples of the batch, by name.
        loader_metrics: those of the loader, over all samples of all workers.
        epoch_metrics: those of the epoch, by loader.
        loader_key, is_train_loader, is_valid_loader: the loader that is read.
        batch_size: samples of this worker's batch.
        epoch_step, batch_step, loader_batch_step: counted from 1.
        num_epochs: of the training.
        need_early_stop: set it to end the training after the epoch.
    """

    model: Any
    criterion: Any
    device: str | None
    optimizer: Any = None
    scheduler: Any = None
    batch: Any = None
    loader_key: str | None = None
    is_train_loader = is_valid_loader = need_early_stop = False
    is_infer_loader = False
    batch_size = epoch_step = batch_step = loader_batch_step = 0
    num_epochs: int | None = None
    given_engine: Any = None
    _engine: BatchEngine | None = None
    _loop: HandSteps | None = None
    _means: LoaderMeans | None = None

    def _forget(self) -> None:
        """Nothing was measured yet."""
        self.batch_metrics: dict[str, Any] = {}
        self.loader_metrics: dict[str, Any] = {}
        self.epoch_metrics: dict[str, dict[str, Any]] = defaultdict(dict)
        self.callbacks: list[Any] = []

    # ------------------------------------------------------------------ what a subclass may change

    def handle_batch(self, batch: Any) -> None:
        """Compute with a batch of a loader, which is on the device: set ``self.batch`` to what
        callbacks look up by key, and ``self.batch_metrics``; or take the step itself, where
        ``self.is_train_loader``."""
        raise UserError(
            f"{type(self).__name__} has no step; write def handle_batch(self, batch), which calls "
            "self.model, and sets self.batch or takes the step"
        )

    # ------------------------------------------------------------------ the training

    @property
    def divides_batches(self) -> bool:
        """Whether a global batch is computed in several parts."""
        loop = self._loop
        return loop is not None and (loop.world.world_size > 1 or loop.settings.accumulate > 1)

    @property
    def engine(self) -> BatchEngine:
        """Where is computed."""
        if self._engine is not None:
            return self._engine
        return BatchEngine(torch.device(self.device or "cpu"))

    def attach(self, loop: HandSteps, callbacks: Iterable[Any]) -> None:
        """A training begins, of which a loop takes the steps."""
        self._loop, self._engine = loop, BatchEngine(loop.device, loop)
        self.callbacks = sorted(callbacks, key=lambda callback: getattr(callback, "order", 100))
        self.model = loop.models if loop.several else loop.model
        handles = {name: SteppingOptimizer(loop, name) for name in loop.groups}
        self.optimizer = handles if loop.several else next(iter(handles.values()))

    def tell_epochs(self, number: int) -> None:
        """How many epochs there are; a subclass may have a property that says it."""
        if not isinstance(getattr(type(self), "num_epochs", None), property):
            self.num_epochs = number

    def evaluates_on(self, engine: BatchEngine) -> None:
        """An evaluation begins, outside of a training."""
        self._engine, self._loop = engine, None

    def detach(self, model: Any, optimizer: Any) -> None:
        """The training has ended."""
        self.model, self.optimizer = model, optimizer
        self._loop = self._engine = self._means = self.batch = None
        self.callbacks = []

    def event(self, hook: str, parts_only: bool = False) -> None:
        """Call a hook of the callbacks, and of the runner: first at a start, last at an end.

        Args:
            hook: its name.
            parts_only: of the callbacks that are part of a step alone.
        """
        if hook.endswith("_start") and not parts_only:
            getattr(self, hook)(self)
        for callback in self.callbacks:
            if has_hook(callback, hook) and (isinstance(callback, BatchCallback) or not parts_only):
                call_hook(callback, hook, self)
        if hook.endswith("_end") and not parts_only:
            getattr(self, hook)(self)

    # ------------------------------------------------------------------ a batch

    def train_step(self, loop: Any, batch: Any) -> None:
        self.batch_step = loop.global_step + 1
        if not loop.accumulates:
            (rows,) = batch.parts
            self._measured(rows)
            return
        with loop.accumulating():
            for rows in batch.parts:
                if rows.count:
                    self._measured(rows)

    def _measured(self, rows: Rows) -> None:
        """Compute with a micro-batch, and take its means in."""
        loop = self._loop
        assert loop is not None
        with evaluation_mode(loop.container) if not rows.count else nullcontext():
            self.compute(rows)
        for name, value in self.batch_metrics.items():
            number = value.detach() if isinstance(value, torch.Tensor) else value
            loop.logged.add(name, number, rows.count)

    def valid_step(self, loop: Any, batch: Any) -> dict[str, Any]:
        """What is measured of one batch."""
        del batch
        assert loop.rows is not None
        self.compute(loop.rows)
        return self.batch_metrics

    def compute(self, rows: Rows) -> None:
        """Compute with a micro-batch, and call the hooks around it; a batch that counts for nothing
        is seen by `handle_batch`, and by callbacks that compute."""
        loop, filler = self._loop, not rows.count
        before = None
        self.batch = rows.batch
        if loop is not None:
            self.batch, before, loop.rows = loop.to_device(rows.batch), loop.rows, rows
        self.batch_size, self.batch_metrics = rows.count, {}
        self.loader_batch_step += not filler
        try:
            self.prepare()
            self.event("on_batch_start", parts_only=filler)
            self.handle(self.batch)
            self.event("on_batch_end", parts_only=filler)
        finally:
            if loop is not None:
                loop.rows = before

    def prepare(self) -> None:
        """Give the members of ``self.batch`` their names, where the runner knows them."""

    def handle(self, batch: Any) -> None:
        """Compute with a batch, as the kind of runner does."""
        self.handle_batch(batch)

    def measure(self, callback: Any, output: torch.Tensor, target: torch.Tensor) -> None:
        if self._means is not None and self.batch_size:
            self._means.observe_for(callback, output, target)

    # ------------------------------------------------------------------ loaders

    def begin_loader(self, name: str, trains: bool, means: LoaderMeans) -> None:
        """A loader is read from here on.

        Args:
            name: of the loader.
            trains: whether it is trained on.
            means: takes in what callbacks measure.
        """
        self.loader_key, self.is_train_loader, self.is_valid_loader = name, trains, not trains
        self.loader_batch_step, self.loader_metrics, self._means = 0, {}, means
        self.event("on_loader_start")

    def end_loader(self, values: dict[str, float], world: World) -> dict[str, float]:
        """A loader is through.

        Args:
            values: means over all samples of all workers.
            world: the workers, which all call it.

        Returns:
            These, with the ``loader_metrics`` that hooks have set.
        """
        if "loss" in values:
            values = {"loss": values["loss"], **values}
        self.loader_metrics = dict(values)
        self.event("on_loader_end")
        given = {
            name: float(value)
            for name, value in self.loader_metrics.items()
            if not (name in values and value == values[name])
        }
        ranks = gather(given, world) if world.world_size > 1 else [given]
        for name in sorted(set().union(*ranks)):
            same = [one.get(name, math.nan) for one in ranks]
            if all(math.isclose(one, same[0], rel_tol=1e-9) for one in same):
                values[name] = same[0]
            elif name not in values:  # else the mean of the batches is that of all workers
                raise UserError(
                    f"loader_metrics[{name!r}] is {', '.join(map(str, same))} on the "
                    f"{len(ranks)} workers, each of its own samples; set batch_metrics[{name!r}] "
                    "to a mean over the batch, which is averaged over all samples"
                )
        self.loader_metrics = dict(values)
        self.epoch_metrics[str(self.loader_key)] = dict(values)
        return values

    # ------------------------------------------------------------------ without a training

    def predict_batch(self, batch: Any) -> Any:
        """What the models give for a batch; for `predict_loader`."""
        raise UserError(
            f"{type(self).__name__} does not know what is predicted; write def "
            "predict_batch(self, batch), which returns self.model(…)"
        )

    def predict_loader(self, *, loader: Any, model: Any = None, seed: int = 42) -> Iterator[Any]:
        """What `predict_batch` gives for each batch of a loader, in this process, in evaluation
        mode and without gradients.

        Args:
            loader: anything that gives batches.
            model: in the place of the runner's.
            seed: of what is drawn meanwhile.
        """
        from allhands.data import preserved_generators, seed_everything

        if model is not None:
            self.model = model
        container = models_in(self.model)
        with preserved_generators(), torch.no_grad(), evaluation_mode(container):
            seed_everything(seed)
            for batch in loader:
                yield self.predict_batch(batch)


def models_in(model: Any) -> nn.Module:
    """A model, or a module that holds all of them."""
    return model if isinstance(model, nn.Module) else nn.ModuleDict(model)

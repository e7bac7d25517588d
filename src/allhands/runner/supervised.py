"""`SupervisedRunner`: objects in, a trained model out, on any number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from allhands.data import is_samples, named_members, rows_in
from allhands.errors import UserError, kind_of
from allhands.loop.reporter import Reporter
from allhands.loop.settings import Data, check_model, check_values
from allhands.runner import standalone
from allhands.runner.hooks import check_runner
from allhands.runner.keys import (
    Keys,
    check_keys,
    check_output_key,
    inputs_of,
    missing_key,
    takes_by_name,
    target_in,
)
from allhands.runner.metrics import named_metrics
from allhands.runner.runner import Runner
from allhands.runner.running import in_training
from allhands.runner.supervised_training import SupervisedTraining
from allhands.runner.train_settings import TrainSettings
from allhands.runner.training import Training
from allhands.strategies import Strategy
from allhands.world import World


class SupervisedRunner(Runner):
    """Trains, evaluates and applies a model that maps an input to an output, given targets.

    A batch is ``(input, target)``, ``(input, …, target)`` whose leading members are all passed to
    the model, or a dict in which `input_key` and `target_key` name the two. A batch that is an
    object (a dataclass, a batch of PyTorch Geometric) is passed to the model as it is, or its
    members that `input_key` names are; `target_key` names its target. Override `handle_batch` for
    anything else.

    Args:
        model: default for the methods' `model`.
        device: ``"cpu"`` or ``"cuda"``; None takes a GPU where there is one.
        input_key: the model's input in batches that are dicts; None is "features". A list of keys
            gives the model several: by their names where its ``forward`` has arguments of all these
            names, else in their order. A dict names the model's argument for each key, ``{"user":
            "user_id", "item": "item_id"}``.
        target_key: the target in batches that are dicts or objects. A list of keys gives a dict of
            targets by key; a dict one by its own names.
        output_key: what criterion, metrics and `predict` take of an output that is a dict, a
            dataclass or an output of transformers, such as "logits". None takes all of it. A
            `ModelLoss` gets the whole output in any case.

    Raises:
        UserError: a key is no string, list or dict of strings; `output_key` is no string. In use:
            the batch or the output has nothing of the name.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        device: str | None = None,
        input_key: Keys | None = None,
        target_key: Keys = "targets",
        output_key: str | None = None,
    ) -> None:
        super().__init__(model, device)
        self.input_key: Keys = check_keys(
            "input_key", "features" if input_key is None else input_key
        )
        self._whole_objects = input_key is None
        #: What `output_key` names.
        self.output_member = check_output_key(output_key)
        self.target_key: Keys = check_keys("target_key", target_key)
        # Whether models of a class are given several inputs by name.
        self._by_name: dict[type, bool] = {}

    # ------------------------------------------------------------------ what a subclass may change

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Call `model` on a batch, which is on the device already; returns ``(output, target)``."""
        if type(batch) in (tuple, list):
            if len(batch) == 2:
                return model(batch[0]), batch[1]
            if len(batch) == 1:
                return model(batch[0]), None
            return model(*batch[:-1]), batch[-1]
        members = named_members(batch)
        if members is None:
            return model(batch), None
        if self._whole_objects and not isinstance(batch, Mapping):
            return model(batch), target_in(members, self.target_key)
        args, kwargs = self._inputs(model, members)
        return model(*args, **kwargs), target_in(members, self.target_key)

    def target_of(self, batch: Any) -> Any:
        """The target in a batch; asked before the forward pass by criteria that count their
        targets.

        Raises:
            UserError: a dict or an object without `target_key`, or something of which it is not
                known where its target is.
        """
        if isinstance(batch, (tuple, list)) and batch:
            return batch[-1]
        members = named_members(batch)
        if members is not None:
            if error := missing_key("target_key", self.target_key, members):
                raise error
            return target_in(members, self.target_key)
        name = type(self).__name__
        raise UserError(
            f"the criterion counts its targets, and {name} does not know where they are in a batch "
            f"that is {kind_of(batch)}; add to {name}: def target_of(self, batch): return batch.y"
        )

    def _inputs(
        self, model: nn.Module, batch: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        keys, by_name = self.input_key, False
        if error := missing_key("input_key", keys, batch):
            raise error
        if isinstance(keys, list):
            kind = type(model)
            if kind not in self._by_name:
                self._by_name[kind] = takes_by_name(model, keys)
            by_name = self._by_name[kind]
        return inputs_of(batch, keys, by_name)

    def rows_of(self, batch: Any) -> int | None:
        """How many samples a batch holds that a collate function of yours has made; None: as many
        as it was given.

        The graphs of a batch of PyTorch Geometric; else the length of the target's first dimension,
        where it is a tensor with one, or that of the first tensor in the batch; or as many as a
        list of dicts in it has. Override it for batches of another form; nobody asks for batches
        that PyTorch's own collate function has made.
        """
        if batch is None or (isinstance(batch, (Mapping, list, tuple)) and not batch):
            return 0
        if isinstance(batch, torch.Tensor) or hasattr(batch, "num_graphs"):
            return rows_in(batch)
        if isinstance(batch, (list, tuple)):
            return len(batch) if is_samples(batch) else rows_in((batch[-1], *batch), False)
        members = named_members(batch)
        if members is None:
            return None
        return rows_in((target_in(members, self.target_key), *members.values()), in_lists=False)

    @property
    def plain_batches(self) -> bool:
        """Whether no subclass has changed what is done with a batch."""
        return type(self).handle_batch is SupervisedRunner.handle_batch

    @property
    def takes_last_as_target(self) -> bool:
        """Whether the last member of a batch is the target, as far as no subclass has changed
        it."""
        own = type(self)
        return self.plain_batches and own.target_of is SupervisedRunner.target_of

    # ------------------------------------------------------------------ evaluate, predict

    def evaluate(  # type: ignore[override]
        self,
        *,
        model: nn.Module | None = None,
        criterion: Any = None,
        loaders: Any = None,
        datasets: Any = None,
        metrics: Any = None,
        distributed: bool | str | Strategy = False,
        workers: int | None = None,
        precision: str = "fp32",
        seed: int = 42,
        verbose: bool = False,
    ) -> dict[str, dict[str, float]]:
        """The loss and the metrics of every loader, each sample counted exactly once: ``{"valid":
        {"loss": …, …}}``.

        Arguments are those of `train`; the model is left as it was. In a callback,
        ``training.model`` (or the model that was given to `train`) is measured as it lies on the
        ranks; call it on all of them.
        """
        chosen, _ = in_training(self._model(model))
        if not callable(criterion):
            raise UserError("evaluate needs a criterion, such as torch.nn.CrossEntropyLoss()")
        check_values(chosen, "evaluate")
        data, named = Data(loaders, datasets), named_metrics(metrics)
        data.check(seed)
        return self._plan(distributed, workers).run(
            standalone.evaluate,
            self,
            (chosen, criterion, data, named, precision, seed),
            verbose=verbose,
        )

    def predict(  # type: ignore[override]
        self,
        *,
        model: nn.Module | None = None,
        loader: Any = None,
        dataset: Any = None,
        batch_size: int | None = None,
        distributed: bool | str | Strategy = False,
        workers: int | None = None,
        precision: str = "fp32",
        seed: int = 42,
    ) -> Any:
        """The model's output for every sample, in the data set's order, at any number of workers.

        Args:
            model: the module to apply.
            loader: a DataLoader; its shuffling is left out, so that row i belongs to sample i. A
                custom sampler is kept, and row i then belongs to the i-th sample that it gives.
                There is a row for each that its collate_fn makes.
            dataset: instead of a loader, read `batch_size` samples at a time.
            batch_size: with `dataset`, samples per worker and batch; None is 32.
            distributed, workers, precision, seed: as for `train`.

        Returns:
            CPU tensors of shape ``[samples, …]``, in the structure (tuple, list, dict) of the
            model's output; the fields of a dataclass or of an output of transformers come as a
            dict. Of a model that gives a list with a dict for each sample, as those of detection
            do, a list of all samples' dicts.

        Raises:
            UserError: a loader with drop_last=True, which would lose rows; an output whose first
                dimension is no batch.
        """
        chosen, _ = in_training(self._model(model))
        check_values(chosen, "predict")
        if (loader is None) == (dataset is None):
            raise UserError("predict needs either loader= or dataset=")
        if loader is not None and batch_size is not None:
            raise UserError(
                f"predict(batch_size={batch_size}) goes with dataset=; a loader has its own: leave "
                "batch_size out"
            )
        data = (
            Data({"predict": loader}, None)
            if loader is not None
            else Data(
                None, {"batch_size": 32 if batch_size is None else batch_size, "predict": dataset}
            )
        )
        (source,) = data.sources(seed).values()
        if source.drop_last:
            raise UserError(
                "predict gives one row a sample, and this loader has drop_last=True; make it with "
                "drop_last=False"
            )
        return self._plan(distributed, workers).run(
            standalone.predict, self, (chosen, data, precision, seed)
        )

    # ------------------------------------------------------------------ small things

    def _model(self, model: nn.Module | None) -> nn.Module:
        chosen = model if model is not None else self.model
        if chosen is None:
            raise UserError("no model: pass model=… here or to SupervisedRunner(model=…)")
        check_model(chosen)
        self._check()
        return chosen

    def _check(self) -> None:
        """Raise `UserError` for a method of a subclass that nobody calls."""
        check_runner(self, SupervisedRunner)

    def _settings(self, **given: Any) -> TrainSettings:
        for name in ("model", "criterion", "optimizer", "scheduler"):
            if isinstance(given[name], Mapping):
                raise UserError(
                    f"{name} is a dict, and {type(self).__name__} trains one model with one "
                    "optimizer; write class Own(allhands.Runner) with train_step(self, loop, batch)"
                )
        model, metrics = self._model(given.pop("model")), named_metrics(given.pop("metrics"))
        return TrainSettings(model=model, metrics=metrics, **given)

    def _training(self, settings: TrainSettings, world: World, reporter: Reporter) -> Training:
        return SupervisedTraining(self, settings, world, reporter)

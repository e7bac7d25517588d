"""The runs of a training with the runner: the user's objects, in this process and in workers."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from allhands.data import Source
from allhands.errors import UserError, WorldError
from allhands.launch import ship
from allhands.launch.unpicklable import explain
from allhands.loop.reporter import Reporter
from allhands.loop.workers import Plan, plan
from allhands.runner.supervised_training import SupervisedTraining
from allhands.runner.train_settings import TrainSettings
from allhands.strategies import Single, Strategy
from allhands.verify.probes import Probe
from allhands.verify.recorder import RunnerRecorder
from allhands.verify.runs import (
    GlobalBatches,
    Runs,
    accumulate_for,
    doubled,
    freeze,
    smallest_cut,
    subject_of,
    watch_order,
)
from allhands.verify.traces import Trace, Variation
from allhands.world import World


class RunnerRuns(Runs):
    """Runs of the user's objects.

    The objects are written once and read anew for every run, here and in the workers, as `train`
    sends them to workers: a run leaves no trace in the user's own objects nor in another run.

    Args:
        objects: what `verify` was given: runner, model, criterion, optimizer, scheduler, data,
            seed, accumulate, clip_norm, precision.
        device: "cpu", "cuda" or None, as for `SupervisedRunner`.
    """

    def __init__(self, objects: dict[str, Any], device: str | None) -> None:
        super().__init__()
        self.device = device
        self._objects = objects
        try:
            self.path = ship.dump(objects, self._folder)
        except (UserError, OSError):
            raise
        except Exception as error:
            raise explain(error, objects) from None
        self.probe = Probe(self.path)
        self.subject = subject_of(objects["model"], objects["precision"], device)

    def cut(self, shares: int) -> int:
        return smallest_cut(_trained(self._objects), shares, self._objects["accumulate"])

    def exact(self, strategy: Strategy) -> bool:
        return strategy.exact_for(self._objects["optimizer"], self._objects["clip_norm"])

    def alone(
        self, variation: Variation, reference: str | None = None, keep: bool = False
    ) -> Trace:
        # In this process.
        here = Plan(Single(), 0, self.device)
        (trace,) = here.run(
            perform, None, (self.path, Single(), [(asdict(variation), reference)], keep)
        )
        return Trace(**trace)

    def distributed(
        self, strategy: Strategy, workers: int, wanted: list[tuple[Variation, str]]
    ) -> list[Trace]:
        # One run after another in the same new processes.
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
    recorder = RunnerRecorder(
        variation.steps, ship.load(reference) if reference and world.rank == 0 else None, keep
    )
    settings = _settings(objects, strategy, variation, recorder)
    freeze(settings.model, variation.frozen)
    runner = objects["runner"]
    if variation.double:
        settings.model.double()
        if isinstance(settings.criterion, nn.Module):
            settings.criterion.double()
    training = SupervisedTraining(runner, settings, world, Reporter())
    trace = Trace([])
    for feed in training.loop.trained:
        watch_order(feed, trace.orders, variation.reverse)
    if variation.double:
        handle_batch = training.forward.handle_batch
        training.forward.handle_batch = lambda model, batch: handle_batch(model, doubled(batch))
    try:
        training.run()
    except WorldError as error:
        trace.failure = str(error)
    trace.steps = recorder.record.steps
    if not trace.steps:
        raise UserError(
            "the training takes no optimizer step: the data holds fewer samples than one global "
            "batch, and drop_last=True leaves "
            "a short one out; write drop_last=False, or a smaller batch_size"
        )
    trace.unwrapped = recorder.record.unwrapped
    return trace


def _settings(
    objects: dict[str, Any], strategy: Strategy, variation: Variation, recorder: RunnerRecorder
) -> TrainSettings:
    accumulate = objects["accumulate"]
    scheduler = (
        objects["scheduler"][0] if isinstance(objects["scheduler"], tuple) else objects["scheduler"]
    )
    # Other loaders do not change the training, unless the learning rate follows what they measure.
    evaluates = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    data = GlobalBatches(objects["data"], variation, accumulate, evaluates)
    data.same_everywhere = True  # every process reads the one file
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
        accumulate=accumulate_for(variation, accumulate, _trained(objects)),
        clip_norm=objects["clip_norm"],
        precision="fp32" if variation.double else objects["precision"],
        check=False,
        overfit=False,
        load_best_on_end=False,
        log_every=variation.steps,
        cut_short=True,
        strategy=strategy,
    )


def _trained(objects: dict[str, Any]) -> list[Source]:
    sources = objects["data"].sources(objects["seed"])
    return [source for source in sources.values() if source.trains]


def settings_to_check(objects: dict[str, Any], steps: int) -> TrainSettings:
    """The user's training as it is, for `TrainSettings.validate`."""
    return _settings(objects, Single(), Variation(steps), RunnerRecorder(steps))

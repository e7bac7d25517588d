"""`Federated`: one training definition, trained by clients that keep their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allhands.errors import UserError
from allhands.federated.federated_settings import FederatedSettings
from allhands.federated.local_training import CLIENT_PRECISIONS
from allhands.federated.team import check_size
from allhands.runner.callbacks import is_overridden
from allhands.strategies import Strategy
from allhands.world import World


class Federated(FederatedSettings, Strategy):
    """Clients train the model on data of their own; a server averages what they have learnt, round
    after round. Simulated: any number of clients on any number of workers, with the same result.

    ::

        history = SupervisedRunner().train(
            model=model, criterion=criterion, optimizer=optimizer, datasets={"batch_size": 32,
            "train": train, "valid": valid}, distributed=Federated(clients=100, per_round=10,
            rounds=50, algorithm="fedavg", local_epochs=5),
        )

    The optimizer is each client's own, made anew in every round; the loaders' `batch_size` is a
    client's.

    Args:
        clients: how many; None where the partition says it.
        partition: who gets which samples, see `allhands.federated.partitions`: a name, ``{"name":
            …, option: …}``, index lists, or a `Clients`.
        per_round: clients of a cohort; None: all.
        rounds: how many.
        algorithm: a name, ``{"name": …, option: …}``, or an `Algorithm`.
        local_epochs: times that a client goes through its data in a round.
        local_steps: optimizer steps of a client in a round, instead of `local_epochs`.
        executor: how a device trains its clients: "serial", "graph", "stacked", ``{"name":
            "stacked", "chunk": 50}``; "auto" tries which is fastest.
        evaluate_every: rounds between two evaluations; the last round is always evaluated.
        local_layers: names of modules, parameters or buffers, such as ``["head.*"]``, that each
            client keeps as its own, under any algorithm.
        on_bad_update: "stop" ends the run when a client's model comes out with NaN or Inf, "skip"
            leaves that client out of the round; both name it.
        test_fraction: how much of each client's own samples is kept from training; the model of
            each client (its own layers included) is measured on them, and the mean over all of them
            is in the history as "clients". None: nothing.
        stages: a class derived from `Rounds` that overrides stages.
        devices_per_client: workers that train a client together, each with a part of every batch;
            their number divides that of the workers.
        on_client_failure: what happens when a client's training raises: "stop" ends the run,
            "retry" trains the client again, "skip" leaves it out of the round; each names it with
            its traceback.
        client_retries: how often "retry" tries before it stops.
        compression: the old name of `compress`.
        privacy: clip clients' updates and add noise to their mean: ``{"clip": 1.0,
            "noise_multiplier": 1.0, "delta": 1e-5}``, or a `Privacy`. The history has epsilon.
        systems: clients' devices in virtual time: ``{"speed": 50.0, "upload": 1e6, "deadline":
            600.0}``, or a `Systems`. The history has seconds of virtual time, and who came late or
            not at all.
        sites: what holds for the same run across real sites (`allhands federated server`):
            ``{"names": […], "min": 3}``, or a `Sites`. A simulation checks it, and that it has as
            many clients as there are names.
        compress: what clients send is narrowed: "fp16", "bf16", "int8", "1bit", "topk", ``{"name":
            "topk", "keep": 0.01, "feedback": True}``, or an `UpdateCompression`; None: they send
            all.

    Of the other arguments of `SupervisedRunner.train`, these mean something of their own here: a
    `scheduler` steps once a round, on the clients' learning rate; callbacks take rounds for epochs,
    and their `on_epoch_end` comes after rounds that are evaluated; `save_every` counts rounds
    (None: after each that is evaluated); `check` is 3 rounds of 3 steps a client. With a logdir,
    the run is resumed to the bit, on any number of workers.

    Raises:
        UserError: an option cannot be honoured; says what to write instead.
    """

    name = "federated"
    exact = False

    def check_settings(self, settings: Any) -> None:
        for name, kept, instead in (
            (
                "max_steps",
                None,
                "training goes by rounds: leave it out, and write Federated(rounds=…)",
            ),
            (
                "evaluate_every",
                None,
                "training goes by rounds: leave it out, and write Federated(evaluate_every=…)",
            ),
            (
                "num_epochs",
                1,
                "training goes by rounds: leave it out, and write "
                f"Federated(rounds={settings.num_epochs})",
            ),
            (
                "steps_per_epoch",
                None,
                "training goes by rounds: leave it out, and write Federated(local_steps=…)",
            ),
            (
                "accumulate",
                1,
                "clients step after each batch: leave it out and make batches "
                f"{settings.accumulate} times larger",
            ),
            ("activation_checkpointing", False, "clients train small models: leave it out"),
            (
                "overfit",
                False,
                "each client draws its own batches: write overfit=False, and "
                "Federated(local_steps=1)",
            ),
            ("log_every", 50, "every round is logged: leave it out"),
            ("profile", None, "its report shows who trained when in a round: leave it out"),
        ):
            value = getattr(settings, name)
            if value != kept:
                raise UserError(f"{name}={value!r} with distributed=Federated(…): {instead}")
        if settings.step in ("compile", "graph"):
            raise UserError(
                f"step={settings.step!r} with distributed=Federated(…): an executor takes the "
                "clients' steps; leave it out, and write Federated(executor='graph')"
            )
        if settings.precision not in CLIENT_PRECISIONS:
            raise UserError(
                f"precision={settings.precision!r} with distributed=Federated(…): clients train in "
                "fp32, or by autocast to bf16, since fp16 needs its losses scaled by a factor that "
                "follows one long training; write precision='bf16'"
            )
        if isinstance(settings.scheduler, tuple) and settings.scheduler[1] == "step":
            raise UserError(
                "scheduler=(…, 'step') with distributed=Federated(…): it steps once a round; write "
                "(…, 'epoch')"
            )
        for callback in settings.callbacks:
            if is_overridden(callback, "on_step_end"):
                raise UserError(
                    f"{type(callback).__name__}.on_step_end is never called in federated training, "
                    "where clients take the steps; "
                    "remove it, or use on_epoch_end, which follows a round"
                )
            for hook in ("on_evaluate_start", "on_evaluate_end"):
                if is_overridden(callback, hook):
                    raise UserError(
                        f"{type(callback).__name__}.{hook} is never called in federated training, "
                        "which evaluates the server's "
                        "model; remove it, or change that model in on_epoch_start"
                    )

    def check(self, world: World) -> None:
        check_size(self.devices_per_client, world.world_size)

    def train_instead(self) -> Callable[..., Any] | None:
        from allhands.federated.federated_training import train

        return train

"""`Federated`: one training definition, trained by clients that keep their data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from allhands.checks import check_whole
from allhands.comm.compress import merged_old
from allhands.errors import UserError, did_you_mean
from allhands.federated.algorithms import ALGORITHMS, Algorithm
from allhands.federated.algorithms.fedbuff import FedBuff
from allhands.federated.buffered import BufferedRounds
from allhands.federated.executors.choice import parse
from allhands.federated.failures import check_action
from allhands.federated.local_training import CLIENT_PRECISIONS
from allhands.federated.privacy import Privacy
from allhands.federated.rounds import Rounds
from allhands.federated.sites.settings import Sites
from allhands.federated.systems import Systems
from allhands.federated.team import check_size
from allhands.federated.update_compression import UpdateCompression, chosen
from allhands.runner.callbacks import is_overridden
from allhands.strategies import Strategy
from allhands.world import World


class Federated(Strategy):
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

    def __init__(
        self,
        clients: int | None = None,
        partition: Any = "iid",
        per_round: int | None = None,
        rounds: int = 10,
        algorithm: str | dict[str, Any] | Algorithm = "fedavg",
        local_epochs: int = 1,
        local_steps: int | None = None,
        executor: str | dict[str, Any] = "auto",
        evaluate_every: int = 1,
        local_layers: Sequence[str] = (),
        on_bad_update: str = "stop",
        on_client_failure: str = "stop",
        client_retries: int = 2,
        devices_per_client: int = 1,
        compression: str | dict[str, Any] | UpdateCompression | None = None,
        privacy: dict[str, Any] | Privacy | None = None,
        systems: dict[str, Any] | Systems | None = None,
        test_fraction: float | None = None,
        stages: type[Rounds] = Rounds,
        sites: dict[str, Any] | Sites | None = None,
        compress: str | dict[str, Any] | UpdateCompression | None = None,
    ) -> None:
        for name, value in (
            ("clients", clients),
            ("per_round", per_round),
            ("rounds", rounds),
            ("local_epochs", local_epochs),
            ("local_steps", local_steps),
            ("evaluate_every", evaluate_every),
            ("devices_per_client", devices_per_client),
        ):
            optional = name in ("clients", "per_round", "local_steps")
            check_whole(name, value, otherwise="None" if optional else "")
        if clients is not None and per_round is not None and per_round > clients:
            raise UserError(
                f"per_round={per_round} of clients={clients}; a round cannot have more clients "
                f"than there are: write per_round={clients}, or None for all of them"
            )
        self.clients, self.partition, self.per_round, self.rounds = (
            clients,
            partition,
            per_round,
            rounds,
        )
        self.algorithm = named(algorithm, ALGORITHMS, "algorithm")
        self.local_epochs, self.local_steps = local_epochs, local_steps
        if not (isinstance(stages, type) and issubclass(stages, Rounds)):
            raise UserError(
                f"stages={stages!r}; it must be a class derived from allhands.federated.Rounds"
            )
        parse(executor)  # raises for a name or an option that there is not
        if isinstance(self.algorithm, FedBuff) and not issubclass(stages, BufferedRounds):
            if stages is not Rounds:
                raise UserError(
                    f"algorithm='fedbuff' does not go by cohorts: derive {stages.__name__} from "
                    "allhands.federated.buffered.BufferedRounds, or leave stages out"
                )
            stages = BufferedRounds
        self.executor, self.evaluate_every, self.stages = executor, evaluate_every, stages
        if isinstance(local_layers, str):
            raise UserError(
                f"local_layers={local_layers!r}; it must be a list of names: write "
                f"[{local_layers!r}]"
            )
        if on_bad_update not in ("stop", "skip"):
            raise UserError(f"on_bad_update={on_bad_update!r}; it must be 'stop' or 'skip'")
        how = executor.get("name") if isinstance(executor, dict) else executor
        if devices_per_client > 1 and how not in ("auto", "serial"):
            raise UserError(
                f"devices_per_client={devices_per_client} trains one client after another; leave "
                f"executor={how!r} out"
            )
        self.devices_per_client = devices_per_client
        check_action(on_client_failure, client_retries)
        self.compression = copy.deepcopy(
            chosen(merged_old(compress, compression, "Federated", "compression"))
        )
        self.privacy, self.systems = (
            _made(privacy, Privacy, "privacy"),
            _made(systems, Systems, "systems"),
        )
        self.sites: Sites | None = _made(sites, Sites, "sites")
        if self.sites is not None and clients is not None:
            self.sites.check_clients(clients)
        self.on_client_failure, self.client_retries = on_client_failure, client_retries
        self.local_layers, self.on_bad_update, self.test_fraction = (
            list(local_layers),
            on_bad_update,
            test_fraction,
        )

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
                f"precision={settings.precision!r} with distributed=Federated(…): fp16 needs its "
                "losses scaled by a factor that follows one long training, and clients begin anew "
                "in every round: write precision='bf16'"
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


def named(given: Any, known: dict[str, Any], what: str) -> Any:
    """The object that a name, or ``{"name": …, option: …}``, stands for; any other object as it is.

    Raises:
        UserError: no such name, or no such option; lists those that there are.
    """
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, dict):
        return copy.deepcopy(given)
    options = dict(given)
    name = options.pop("name", None)
    if name not in known:
        raise UserError(
            f"there is no {what} {name!r}{did_you_mean(name, known)} Known are: {', '.join(known)}"
        )
    takes = list(inspect.signature(known[name]).parameters)
    for option in options:
        if option not in takes:
            raise UserError(
                f"the {what} {name!r} has no option {option!r}{did_you_mean(option, takes)} "
                f"It takes: {', '.join(takes) or 'none'}"
            )
    return known[name](**options)


def _made(given: Any, kind: Any, what: str) -> Any:
    """An object of `kind` from its options in a dict; None and such an object as they are.

    Raises:
        UserError: it is something else, or an option is unknown or missing; says what there is.
    """
    if given is None or isinstance(given, kind):
        return copy.deepcopy(given)
    takes = inspect.signature(kind).parameters
    needs = [name for name, option in takes.items() if option.default is option.empty]
    if not isinstance(given, dict):
        raise UserError(f"{what}={given!r}; write options, {what}={{…}}, of: {', '.join(takes)}")
    for option in [
        *(name for name in given if name not in takes),
        *(name for name in needs if name not in given),
    ]:
        raise UserError(
            f"{what}={given!r}: {'there is no option' if option in given else 'it needs'} "
            f"{option!r}; it takes: {', '.join(takes)}"
        )
    return kind(**given)

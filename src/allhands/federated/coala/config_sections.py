"""The sections of a configuration under COALA's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from allhands.errors import UserError
from allhands.federated.systems import Systems, coala_delays

Count = Annotated[int, Field(strict=True, ge=1)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


def only(default: Any, reason: str) -> Any:
    """A key that may be written with its default value, and is refused with any other."""
    return Field(
        default=default,
        description=f"only {default!r}: {reason}",
        json_schema_extra={"only": reason},
    )


class CoalaSection(BaseModel):
    """A part of the configuration; unknown keys, and values that nothing here can honour, are
    refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="after")
    def _honoured(self) -> CoalaSection:
        refused = []
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and "only" in extra and getattr(self, name) != field.default:
                refused.append(
                    f"{name} = {getattr(self, name)!r} cannot be honoured, only {field.default!r}: "
                    f"{extra['only']}"
                )
        if refused:
            raise ValueError("; ".join(refused))
        return self


class CoalaData(CoalaSection):
    """Which data set, and which client gets what."""

    root: str | None = Field(
        default=None,
        description="folder of the data sets; not set: the folder that ALLHANDS_DATA names",
    )
    dataset: str = Field(
        default="mnist",
        description="digits, mnist, cifar10, cifar100, shakespeare; others through "
        "register_dataset (COALA's default, femnist, is not here)",
    )
    split_type: Literal["iid", "niid", "dir", "class"] = Field(
        default="iid",
        description="iid; niid: one client a writer (mnist) or speaker (shakespeare); dir: "
        "Dirichlet; class: some classes a client",
    )
    fl_type: Any = only("supervised", "write a client with a train of its own, and register_client")
    semi_scenario: Any = only("label_in_server", "training is supervised")
    num_labels_per_class: Any = only(100, "training is supervised")
    min_size: Count = Field(
        default=10,
        description="samples that a client has at least; dir: drawn until all have them; niid: "
        "clients with fewer are left out",
    )
    data_amount: Share = Field(
        default=0.05,
        description="niid: the part of all samples that is used, whole clients drawn by the seed",
    )
    iid_fraction: Any = only(0.1, "set num_of_clients to the number of clients")
    user: Flag = Field(
        default=False,
        description="shakespeare: the test set is of other speakers; False: of the last lines of "
        "each",
    )
    train_test_split: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.9, description="shakespeare: the part to train on"
    )
    class_per_client: Count = Field(default=1, description="class: how many classes a client has")
    num_of_clients: Count = Field(
        default=100, description="clients; niid has those of the data set"
    )
    alpha: Positive = Field(
        default=0.5, description="dir: concentration of the Dirichlet distribution"
    )
    weights: list[Positive] | None = Field(
        default=None,
        description="iid: proportions of the clients' numbers of samples; fewer than clients are "
        "repeated",
    )

    @model_validator(mode="after")
    def _agrees(self) -> CoalaData:
        given, split = self.model_fields_set, self.split_type
        default = {name: field.default for name, field in type(self).model_fields.items()}
        for name, wanted in (
            ("data_amount", "niid"),
            ("class_per_client", "class"),
            ("alpha", "dir"),
            ("weights", "iid"),
        ):
            if getattr(self, name) != default[name] and split != wanted:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} has no effect on split_type '{split}'; "
                    f"leave it out, or set split_type to '{wanted}'"
                )
        for name in ("user", "train_test_split"):
            if getattr(self, name) != default[name] and self.dataset != "shakespeare":
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} is for shakespeare; '{self.dataset}' has a "
                    "test set of its own: leave it out"
                )
        if split == "niid" and "num_of_clients" in given:
            raise ValueError(
                "num_of_clients is decided by the data set with split_type 'niid'; leave it out "
                "(min_size and data_amount say which clients are used)"
            )
        return self


class CoalaOptimizer(CoalaSection):
    """A client's optimizer, made anew in every round."""

    type: str = Field(
        default="Adam",
        description="a class of torch.optim that treats every number alike, capitals or not",
    )
    lr: Positive = Field(default=0.001, description="learning rate")
    momentum: Annotated[float, Field(ge=0)] = Field(
        default=0.9, description="for an optimizer that has one; refused elsewhere, save 0.9"
    )
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="not set: 0.0005 for SGD, 0 for others; COALA drops it with Adam, here it acts "
        "when it is written",
    )

    def options(self) -> dict[str, float]:
        """What the class takes. Raises `UserError` for a momentum that it does not."""
        kind, options = self.type.lower(), {"lr": self.lr}
        if kind in ("sgd", "rmsprop"):
            options["momentum"] = self.momentum
        elif self.momentum not in (0.9, 0):
            raise UserError(
                f"client.optimizer.momentum = {self.momentum:g}: {self.type} has none; write type: "
                "SGD, or leave it out"
            )
        if kind == "sgd" or self.weight_decay is not None:
            if kind == "rprop":
                raise UserError("client.optimizer.weight_decay: Rprop has none; leave it out")
            options["weight_decay"] = 0.0005 if self.weight_decay is None else self.weight_decay
        return options


class ServerOptimizer(CoalaSection):
    """Of COALA's semi-supervised and split learning only."""

    type: Any = only("Adam", "the server has no optimizer in FedAvg")
    lr: Any = only(0.001, "the server has no optimizer in FedAvg; write client.optimizer.lr")
    momentum: Any = only(0.5, "the server has no optimizer in FedAvg")
    weight_decay: Any = only(0.0005, "the server has no optimizer in FedAvg")


class ServerConfig(CoalaSection):
    """The rounds."""

    track: Any = only(False, "the history is in what run() returns")
    visualize: Flag = Field(
        default=False,
        description="call init_visualization and tracking_visualization of the registered server",
    )
    rounds: Count = Field(default=10, description="how many; COALA's 0, for ever, is refused")
    clients_per_round: Count = Field(
        default=5, description="clients of a round; more than there are is refused"
    )
    test_every: Count = Field(
        default=1, description="rounds between two tests; the last round is always tested"
    )
    save_model_every: Count = Field(
        default=10, description="rounds between two saved models, and the last"
    )
    save_model_path: str = Field(
        default="", description="folder of the saved models; not set: saved_models"
    )
    batch_size: Count = Field(default=32, description="samples of a batch when the server tests")
    test_all: Flag = Field(
        default=False,
        description="test before the first round too (round -1), and all clients instead of the "
        "cohort",
    )
    random_selection: Flag = Field(
        default=True, description="False: always the first clients_per_round clients"
    )
    aggregation_strategy: Literal["FedAvg", "equal"] = Field(
        default="FedAvg", description="by samples, or all clients alike"
    )
    aggregation_content: Literal["all", "parameters"] = Field(
        default="all",
        description="parameters: refused for a model with buffers, since COALA keeps those of "
        "whichever client came first",
    )
    epoch: Any = only(5, "COALA never reads it; write client.local_epoch")
    optimizer: ServerOptimizer = ServerOptimizer()


class ClientConfig(CoalaSection):
    """A client's training."""

    track: Any = only(False, "the clients' loss is in the history that run() returns")
    batch_size: Count = Field(default=32, description="samples of an optimizer step")
    test_batch_size: Count = Field(
        default=5,
        description="samples of a batch when clients test; not written: 64, save in a registered "
        "client's own test, which gets 5",
    )
    local_epoch: Count = Field(
        default=10, description="times that a client goes through its samples in a round"
    )
    optimizer: CoalaOptimizer = CoalaOptimizer()
    seed: Whole = Field(
        default=0, description="changes the order of the clients' samples, and nothing else"
    )
    local_test: Flag = Field(
        default=False, description="call test_local of the registered client after its training"
    )
    rounds: Count | None = Field(
        default=None,
        description="as in COALA's tutorial: may repeat server.rounds, and has no effect",
    )


class Distributed(CoalaSection):
    """The processes. Nothing needs to be set under torchrun, srun, mpirun or `allhands launch`."""

    backend: Literal["auto", "nccl", "gloo", "mpi"] = Field(
        default="auto", description="auto: nccl with GPUs, gloo without"
    )
    init_method: str = Field(default="", description="tcp://HOST:PORT of the first process")
    world_size: Whole = Field(
        default=0, description="number of processes, as gpu; 0: as the launcher says"
    )
    rank: Whole = Field(default=0, description="number of this process")
    local_rank: Whole = Field(
        default=0, description="its number on its host, which decides its GPU"
    )


class Tracking(CoalaSection):
    """What is told."""

    database: Any = only("", "the history is in what run() returns")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = Field(
        default="INFO", description="from WARNING on nothing is printed"
    )
    log_file: Any = only("", "COALA never reads it; redirect the output")
    metric_file: Any = only("", "COALA never reads it; the history is in what run() returns")
    save_every: Any = only(1, "COALA never reads it; write server.save_model_every")


class Heterogeneity(CoalaSection):
    """Which process trains which client, and slow clients: in virtual time, where COALA sleeps."""

    simulate: Flag = Field(
        default=False,
        description="slow clients, in virtual time: `virtual_seconds` in the history; nobody "
        "sleeps",
    )
    hetero_type: Literal["iso", "dir", "real"] = Field(
        default="real",
        description="how slowness is spread; real, the speeds of "
        "COALA's list of telephones, is refused with simulate",
    )
    level: Annotated[int, Field(strict=True, ge=0, le=5)] = Field(
        default=3, description="of slowness, 0 (all alike) to 5"
    )
    sleep_group_num: Count = Field(default=1000, description="different degrees of slowness")
    total_time: Positive = Field(
        default=1000, description="seconds by which all clients together are slow in a round"
    )
    fraction: Share = Field(default=1, description="part of the clients that is slow at all")
    grouping_strategy: Literal["greedy", "random", "slowest"] = Field(
        default="greedy", description="how clients are dealt to processes; the result is the same"
    )
    initial_default_time: Any = only(5, "costs are counted in optimizer steps")
    default_time_momentum: Any = only(0.2, "costs are counted in optimizer steps")

    @model_validator(mode="after")
    def _measured(self) -> Heterogeneity:
        for name in ("hetero_type", "level", "sleep_group_num", "total_time", "fraction"):
            if not self.simulate and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} has no effect without slow clients; set "
                    "simulate to True"
                )
        if self.simulate and self.hetero_type == "real" and self.level:
            raise ValueError(
                "hetero_type = 'real' draws from COALA's list of telephones, which is not here; "
                "set hetero_type to 'dir' or 'iso', or train by Federated(systems={'delay': "
                "coala_delays('real', …, speeds=[…])})"
            )
        return self

    def systems(self, clients: int, seed: int) -> Systems | None:
        """Slow clients in virtual time; None without `simulate`."""
        if not self.simulate:
            return None
        return Systems(
            delay=coala_delays(
                self.hetero_type,
                clients,
                seed,
                level=self.level,
                total_time=self.total_time,
                groups=self.sleep_group_num,
                fraction=self.fraction,
            )
        )

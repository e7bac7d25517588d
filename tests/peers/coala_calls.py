"""COALA's calls, and what becomes of each here."""

from __future__ import annotations

from pathlib import Path

from tests.peers.checkout import functions, methods, public_names
from tests.peers.peer_page import Parameters, Section

_LOADER = "differs: `transform` is refused: it is the data set's; `num_workers` has no effect"
_ALL = {
    "init": "differs: every key is honoured or refused, see the [table](migrate_coala.md#keys)",
    "init_dataset": "",
    "init_model": "",
    "run": "differs: returns the history and the model, in every process",
    "load_config": "differs: `file` is read safely and checked",
    "register_dataset": "",
    "register_model": "",
    "register_server": "differs: a class with methods that nothing would call is refused",
    "register_client": "differs: a class with methods that nothing would call is refused",
}
_SERVER = {
    "BaseServer": "",
    "start": "",
    "pre_train": "",
    "train": "",
    "post_train": "",
    "pre_test": "",
    "test": "",
    "post_test": "",
    "should_terminate": "differs: what the first process answers counts for all",
    "test_in_client": "",
    "test_in_server": "differs: the test set is shared out to all processes",
    "selection": "",
    "grouping_for_distributed": "differs: an override changes nothing; "
    "`resource_heterogeneous.grouping_strategy` says who trains whom",
    "compression": "",
    "distribution_to_train": "",
    "get_test_clients": "",
    "aggregation": "",
    "aggregate": "differs: an override gets the models of the whole cohort, in every process",
    "set_model": "",
    "num_of_clients": "",
    "save_model": "",
    "print_": "",
    "is_primary_server": "",
    "init_visualization": "",
    "tracking_visualization": "",
}
_CLIENT = {
    "BaseClient": "",
    "run_train": "differs: returns the model that was learnt; `self.model` is shared by the "
    "clients of a process",
    "run_test": "differs: returns the values",
    **dict.fromkeys(
        (
            "set_model",
            "decompression",
            "pre_train",
            "train",
            "post_train",
            "pretrain_setup",
            "load_loss_fn",
            "load_loader",
            "test_local",
            "pre_test",
            "test",
            "post_test",
            "encryption",
            "compression",
            "post_upload",
        ),
        "",
    ),
    "load_optimizer": "differs: Adam's weight decay acts where it is written",
}


def _of(kind: str, notes: dict[str, str]) -> dict[str, str]:
    return {name if name == kind else f"{kind}.{name}": note for name, note in notes.items()}


SECTIONS = {
    "coala": Section("coala", "allhands.federated", _ALL),
    "coala.server": Section("coala.server", "allhands.federated", _of("BaseServer", _SERVER)),
    "coala.client": Section("coala.client", "allhands.federated", _of("BaseClient", _CLIENT)),
    "coala.datasets": Section(
        "coala.datasets",
        "allhands.federated",
        {
            "FederatedDataset": "differs: made of a data set and its division",
            "FederatedTensorDataset": "differs: `data_wrapping` is refused: `transform` does it",
            "FederatedTensorDataset.simulation": "differs: done when the data set is registered",
            "FederatedTensorDataset.total_size": "",
            "FederatedTorchDataset": "differs: `is_loaded=True` is refused: pass data sets",
            **{
                f"{kind}.{method}": note
                for kind in (
                    "FederatedDataset",
                    "FederatedTensorDataset",
                    "FederatedTorchDataset",
                )
                for method, note in (("loader", _LOADER), ("size", ""), ("users", ""))
            },
        },
    ),
    "coala.models": Section("coala.models", "allhands.federated"),
    "coala.distributed": Section("coala.distributed", "allhands.federated"),
    "coala.distributed.slurm": Section(
        "coala.distributed.slurm",
        "allhands.federated.distributed",
        {"slurm.setup": "differs: outside of a task of srun an error, not `(0, 0, 0, '')`"},
    ),
}


def found(checkout: Path) -> dict[str, dict[str, Parameters]]:
    """The calls that a checkout has, by section."""
    coala = checkout / "coala"
    at_top = functions(coala / "coordinator.py") | functions(coala / "service.py")
    datasets = coala / "datasets" / "dataset.py"
    return {
        "coala": {name: at_top.get(name, ()) for name in public_names(coala)},
        "coala.server": {
            **methods(coala / "server" / "base.py", "BaseServer"),
            **_others(coala / "server"),
        },
        "coala.client": {
            **methods(coala / "client" / "base.py", "BaseClient"),
            **_others(coala / "client"),
        },
        "coala.datasets": {
            **methods(datasets, "FederatedDataset"),
            **methods(datasets, "FederatedTensorDataset"),
            **methods(datasets, "FederatedTorchDataset"),
            **_others(coala / "datasets"),
        },
        "coala.models": _others(coala / "models"),
        "coala.distributed": _others(coala / "distributed"),
        "coala.distributed.slurm": {
            f"slurm.{name}": parameters
            for name, parameters in functions(coala / "distributed" / "slurm.py").items()
            if name == "setup"
        },
    }


def _others(folder: Path) -> dict[str, Parameters]:
    """Names of a package whose methods have rows of their own, or which are plain."""
    shown = ("BaseServer", "BaseClient", "FederatedDataset")
    shown += ("FederatedTensorDataset", "FederatedTorchDataset")
    return {name: () for name in public_names(folder) if name not in shown}

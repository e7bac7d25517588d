"""Names of COALA's packages that are not here, and what to write instead."""

from __future__ import annotations

_SERVICES = (
    "`allhands federated server -C run.yml` on the server's host and `allhands federated site "
    "-C run.yml` at each site (docs/federated_sites.md)"
)
_SPLIT = "data.split_type in the configuration"
_OWN_TRAINING = "train(self, conf, device) of a registered client"
INSTEAD = {
    **dict.fromkeys(
        ("start_server", "start_client", "start_remote_server", "start_remote_client"), _SERVICES
    ),
    "FederatedImageDataset": "register_dataset(torchvision.datasets.ImageFolder(folder, transform),"
    " …), which data.split_type divides; FederatedTorchDataset({client: data set, …}) where the "
    "clients' images are divided already",
    "FederatedMultiDomainDataset": "register_dataset(FederatedTorchDataset({client: data set, …}),"
    " …)",
    "FederatedContinualDataset": _OWN_TRAINING,
    **dict.fromkeys(
        ("ServerService", "ClientService", "grpc_wrapper", "codec", "get_clients", "SOURCES"),
        _SERVICES,
    ),
    **dict.fromkeys(("common_pb2", "server_service_pb2", "client_service_pb2"), _SERVICES),
    "service": "nothing: the history is in what run() returns",
    **dict.fromkeys(
        (
            "construct_datasets",
            "construct_landmarks_datasets",
            "construct_modelnet40_datasets",
            "construct_casia_webface_datasets",
        ),
        "register_dataset(train, test)",
    ),
    **dict.fromkeys(
        ("Cifar10", "Cifar100", "Femnist", "Shakespeare", "BaseDataset"),
        "data.dataset in the configuration, or register_dataset(train, test)",
    ),
    **dict.fromkeys(
        ("data_simulation", "iid", "non_iid_dirichlet", "non_iid_class", "equal_division"), _SPLIT
    ),
    "quantity_hetero": "data.weights in the configuration",
    **dict.fromkeys(
        (
            "federated_averaging",
            "federated_averaging_only_params",
            "weighted_sum",
            "weighted_sum_only_params",
        ),
        "aggregate(self, models, weights) of a registered server",
    ),
    **dict.fromkeys(("dist_init", "get_device", "grouping"), "nothing: init(config) does it"),
    **dict.fromkeys(
        (
            "reduce_models",
            "reduce_models_only_params",
            "reduce_value",
            "reduce_values",
            "reduce_weighted_values",
            "gather_value",
        ),
        "torch.distributed.all_reduce",
    ),
    "setup": "slurm.setup()",
    "get_ip": "slurm.setup(), which gives the address",
    "BaseModel": "torch.nn.Module",
}

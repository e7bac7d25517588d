"""FedBN: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization,
ICLR 2021."""

from __future__ import annotations

from torch import nn

from allhands.compat import NormBase
from allhands.errors import UserError
from allhands.federated.algorithms.fedavg import FedAvg

NORMALISATION = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class FedBN(FedAvg):
    """FedAvg of all but the layers of normalisation, whose weights and statistics each client keeps
    as its own (algorithm 1 of the paper).

    To keep them apart under another algorithm, name them in `local_layers`.

    Args:
        weighted: see `FedAvg`.
    """

    name = "fedbn"

    def keeps(self, model: nn.Module) -> list[str]:
        names = [
            name for name, module in model.named_modules() if isinstance(module, NORMALISATION)
        ]
        if not names:
            raise UserError(
                "algorithm='fedbn': the model has no layer of normalisation that clients could "
                "keep; write algorithm='fedavg'"
            )
        return names

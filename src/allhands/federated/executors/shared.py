"""One client after another, each trained by several ranks together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from allhands.data.trees import map_tensors
from allhands.errors import UserError
from allhands.federated.algorithms.base import Server
from allhands.federated.executors.base import CohortMember, ExecutorContext
from allhands.federated.executors.serial import Serial
from allhands.federated.executors.trial import look
from allhands.federated.team import Team, TeammateError
from allhands.step import LossRule
from allhands.step.counted import Counted


class Shared(Serial):
    """`Serial`, in which each rank of a team takes its part of every batch; losses and gradients
    are summed over the team, weighted by samples, so that all of its ranks take the step that one
    device would take on the whole batch, to rounding.

    The model must treat samples apart and draw nothing, and the criterion must be a mean or sum
    over samples.

    Args:
        team: the ranks.

    Raises:
        UserError: it cannot be shared; says why.
    """

    name = "shared"
    writes_row = True

    def __init__(self, work: ExecutorContext, server: Server, team: Team) -> None:
        super().__init__(work, server)
        self.team = team
        self.rule.use_samples_if_equal(work.samples.targets())
        refusal = self._why_not()
        if refusal is not None:
            raise UserError(
                f"devices_per_client={team.size}: {refusal}; write devices_per_client=1"
            )

    def _why_not(self) -> str | None:
        if isinstance(getattr(self.work.local.criterion, "__self__", None), Counted):
            return (
                "the criterion is no mean over the samples, and the parts of a batch would be "
                "weighted as if it were"
            )
        if self.rule.counts_targets:
            return (
                "the criterion is a mean over the targets that count, of which each part of a "
                "batch has others"
            )
        found = look(self.work, self.server)
        if self.noise.names or found.draws:
            names = ", ".join([*self.noise.names, *found.draws])
            return (
                f"the model draws numbers ({names}), and the parts of a batch would not draw "
                "those of the whole"
            )
        if found.couples:
            return (
                "what the model makes of a sample depends on the others in the batch "
                "(BatchNorm?), which are apart then"
            )
        return None

    def _gradient(
        self, job: CohortMember, step: int, batch: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        work, failed = self.work, None
        self.gradients.zero_()
        for weight in self._weights:
            weight.grad = None
        said = torch.zeros(2, dtype=torch.float64, device=self.server.device)
        try:
            # The whole batch is read, so that augmentation draws what it would draw on one device.
            whole = work.samples.take(batch, work.seed, self.server.round, job.client, step)
            first, last = (
                len(batch) * place // self.team.size
                for place in (self.team.place, self.team.place + 1)
            )
            if last > first:
                with self.precision.autocast():
                    output, target = work.local.forward(
                        work.model, _part(whole, len(batch), first, last)
                    )
                    if step == 0:
                        self.rule.check_shapes(output, target)
                    loss = work.local.criterion(output, target)
                if step == 0:
                    LossRule.check_value(loss)
                loss = loss if self.rule.sums else loss * ((last - first) / len(batch))
                loss.backward()
                self._put_in_row(self._made())
                said[0] = loss.detach()
        except Exception as error:  # the others wait for this rank's part
            failed = error
            said[1] = 1.0
        dist.all_reduce(said, group=self.team.group)
        if failed is not None:
            raise failed
        if said[1] > 0:
            raise TeammateError("another rank of the team failed")
        dist.all_reduce(self.gradients, group=self.team.group)
        return said[0]


def _part(batch: Any, samples: int, first: int, last: int) -> Any:
    """Samples `first` to `last` of a batch of tensors, in the structure that it has."""
    return map_tensors(
        batch, lambda leaf: leaf[first:last] if leaf.dim() and len(leaf) == samples else leaf
    )

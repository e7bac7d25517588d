"""How every client trains: the loss, the optimizer, the batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from allhands.checks import check_choice, check_whole
from allhands.data import derive_seed
from allhands.errors import UserError, kind_of
from allhands.federated.row_layout import RowLayout

#: fp16 needs its losses scaled by a factor that follows the training, which clients that begin anew
#: every round do not have.
CLIENT_PRECISIONS = ("fp32", "bf16")
_NOT_PLAIN = ("momentum", "weight_decay", "maximize", "differentiable", "foreach", "fused")
Forward = Callable[[nn.Module, Any], tuple[Any, Any]]


def pair_forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """The model's output and the target for a batch ``(input, …, target)``."""
    return model(*batch[:-1]), batch[-1]


@dataclass
class LocalOptimizer:
    """The optimizer that each client starts anew: its class, its options, and which parameters each
    group holds.

    Optimizers of torch.optim that treat every number alike run on flat vectors, which is the same
    arithmetic in fewer and larger operations; `flat` says whether this one does.
    """

    kind: type[torch.optim.Optimizer]
    groups: list[list[str]]
    options: list[dict[str, Any]] = field(default_factory=lambda: [{}])

    # Each updates a number from that number's own gradient and state only.
    ELEMENTWISE = (
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "ASGD",
        "Rprop",
    )
    FUSED = ("SGD", "Adam", "AdamW")  # of these, those with a fused update on CPUs

    @classmethod
    def like(cls, optimizer: torch.optim.Optimizer, model: nn.Module) -> LocalOptimizer:
        """The same optimizer as one made over a model's parameters."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups, options = [], []
        for group in optimizer.param_groups:
            groups.append([names[id(p)] for p in group["params"] if p.requires_grad])
            options.append(
                {
                    key: copy.deepcopy(value)
                    for key, value in group.items()
                    if key not in ("params", "initial_lr")
                }
            )
        return cls(type(optimizer), groups, options)

    @classmethod
    def of(cls, name: str, model: nn.Module, **options: Any) -> LocalOptimizer:
        """An optimizer of torch.optim by name, in any spelling of capitals. Raises `UserError` with
        the names there are."""
        known = {kind: getattr(torch.optim, kind) for kind in cls.ELEMENTWISE}
        for kind, made in known.items():
            if kind.lower() == str(name).lower():
                return cls.like(made(model.parameters(), **options), model)
        raise UserError(f"there is no optimizer '{name}' for clients; there are {', '.join(known)}")

    @property
    def flat(self) -> bool:
        """Whether it gives the same result on a flat vector as on the parameters that lie in it."""
        return (
            self.kind.__module__.startswith("torch.optim")
            and self.kind.__name__ in self.ELEMENTWISE
        )

    @property
    def plain(self) -> bool:
        """Whether a step is one subtraction: SGD without momentum and the like, with a rate that is
        a number, and computed in whatever way."""
        return self.kind is torch.optim.SGD and all(
            not any(options.get(name) for name in _NOT_PLAIN)
            and not isinstance(options.get("lr"), torch.Tensor)
            for options in self.options
        )

    def make(
        self, layout: RowLayout, rows: torch.Tensor, gradients: torch.Tensor
    ) -> torch.optim.Optimizer:
        """The optimizer over rows of shape ``[clients, length]``, whose gradients are ``[clients,
        trained]``; both stay where they are and are changed in place."""
        groups = []
        for (start, stop), options in zip(layout.groups, self.options, strict=True):
            flat = rows[:, start:stop].detach().requires_grad_()
            flat.grad = gradients[:, start:stop]
            groups.append({"params": [flat], **options, **self._way(options, flat)})
        return self.kind(groups)  # type: ignore[call-arg]  # of a class of its own, with defaults

    def _way(self, options: Mapping[str, Any], one: torch.Tensor) -> dict[str, Any]:
        """How the update of `one` vector, or of tensors on a processor that are like `one`, is
        computed, where the user leaves it open."""
        if options.get("foreach", False) is not None or options.get("fused"):
            return {}
        # One pass over the memory, and no temporary vectors: on a CPU half the time of Adam.
        if (
            one.device.type == "cpu"
            and self.kind.__name__ in self.FUSED
            and options.get("fused", False) is None
            and not options.get("differentiable")
        ):
            return {"fused": True}
        # Operations on lists of tensors cost more than they spare when the list has one.
        return {"foreach": False}

    def over(self, named: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
        """The optimizer over tensors by the parameters' names, each for itself."""
        made = []
        for group, options in zip(self.groups, self.options, strict=True):
            params = [named[name] for name in group]
            way = self._way(options, params[0]) if self.flat and params else {}
            made.append({"params": params, **options, **way})
        return self.kind(made)  # type: ignore[call-arg]

    def set_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer that `make` or `over` made the `options`, of which a schedule may have
        changed some."""
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(
                (key, value) for key, value in options.items() if key not in ("foreach", "fused")
            )


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """The step of one that a `LocalOptimizer` has made which is `plain`: one operation a group. All
    parameters must have gradients. What PyTorch's function does around it takes longer."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            weights = group["params"]
            torch._foreach_add_(weights, [one.grad for one in weights], alpha=-group["lr"])


def restart(optimizer: torch.optim.Optimizer) -> None:
    """Forget a client's state. Zeros are what a new optimizer begins with, where that is so, and
    spare a new allocation."""
    zeros = type(optimizer) in (
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
    )
    if type(optimizer) is torch.optim.SGD:
        zeros = all(group["dampening"] == 0 for group in optimizer.param_groups)
    if not zeros:
        optimizer.state.clear()
        return
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    if type(optimizer) is torch.optim.Adagrad:
        # PyTorch 2.11 makes this state in the constructor only, so that it cannot be removed.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    optimizer.state[parameter]["sum"].fill_(group["initial_accumulator_value"])


@dataclass
class LocalTraining:
    """What a client does with its data in a round.

    Args:
        criterion: ``(output, target)`` to one number, the mean over the batch.
        optimizer: made anew for every client and round.
        batch_size: samples of a step; None: all of a client's samples in one step.
        epochs: times that a client goes through its data.
        steps: optimizer steps instead of epochs; data that end sooner begin again, in a new order.
        clip_norm: bound of the norm of a client's gradient in each step.
        forward: ``(model, batch)`` to ``(output, target)``.
        drop_last: leave out a last batch that is short, unless it is the client's only one.
        precision: "fp32", or "bf16": forward passes under autocast; weights, gradients and sums
            stay as they are.
    """

    criterion: Any
    optimizer: LocalOptimizer
    batch_size: int | None = 32
    epochs: int = 1
    steps: int | None = None
    clip_norm: float | None = None
    forward: Forward = pair_forward
    drop_last: bool = False
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if not callable(self.criterion):
            raise UserError(
                f"criterion is {kind_of(self.criterion)}; pass a loss such as "
                "torch.nn.CrossEntropyLoss()"
            )
        for name in ("batch_size", "epochs", "steps"):
            check_whole(name, getattr(self, name), otherwise="" if name == "epochs" else "None")
        check_choice("precision", self.precision, CLIENT_PRECISIONS)

    def sizes(self, samples: int) -> list[int]:
        """Samples in each step of one pass over a client's data."""
        size = min(self.batch_size or samples, samples)
        full, rest = divmod(samples, size)
        return [size] * full + ([rest] if rest and not self.drop_last else [])

    def num_steps(self, samples: int) -> int:
        """Optimizer steps of a client with so many samples."""
        return self.steps if self.steps is not None else self.epochs * len(self.sizes(samples))

    def num_seen(self, samples: int) -> int:
        """Samples that a client of so many samples sees in a round."""
        sizes = self.sizes(samples)
        passes, rest = divmod(self.num_steps(samples), len(sizes))
        return passes * sum(sizes) + sum(sizes[:rest])

    def order(
        self, indices: torch.Tensor, seed: int, round_: int, client: int
    ) -> tuple[np.ndarray, list[int]]:
        """A client's samples in the order in which its steps take them, which depends on (seed,
        round, client, pass) only.

        Args:
            indices: the client's samples: int64, shape ``[samples]``, on the processor.
            seed, round_, client: who trains, and when.

        Returns:
            The samples of all steps, one after another (int64), and how many each step takes.
        """
        held, sizes = indices.numpy(), self.sizes(len(indices))
        left, passes, taken = self.num_steps(len(indices)), [], sum(sizes)
        for epoch in range(-(-left // len(sizes))):
            generator = torch.Generator()
            generator.manual_seed(derive_seed(seed, "client", round_, client, epoch))
            passes.append(held[torch.randperm(len(held), generator=generator).numpy()[:taken]])
        sizes = (sizes * len(passes))[:left]
        order = passes[0] if len(passes) == 1 else np.concatenate(passes)
        return order[: sum(sizes)], sizes

    def batches(
        self, indices: torch.Tensor, seed: int, round_: int, client: int
    ) -> Iterator[torch.Tensor]:
        """The samples of each step, as `order` gives them."""
        order, sizes = self.order(indices, seed, round_, client)
        yield from torch.from_numpy(order).split(sizes)

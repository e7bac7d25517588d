"""The models of the rows: small, smooth, and each with one habit that has made a strategy compute
something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

#: Cuts the first Linear of `mlp` by columns and the second by rows.
PLAN = {"0": "colwise", "2": "rowwise"}


def mlp(*middle: nn.Module, seed: int = 0) -> nn.Sequential:
    """6 features to 3 outputs; `middle` stands between the second and the third layer."""
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), *middle, nn.Tanh(), nn.Linear(8, 3)
    )


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def never_used() -> nn.Module:
    """A layer that no forward pass calls."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.used, self.unused = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(self.begin(x))

        def begin(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.first(x))

        def chain(self) -> list[Any]:
            return [("begin", ["first", "unused"]), "used"]

    torch.default_generator.manual_seed(0)
    return Model()


def tied() -> nn.Module:
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return model


class Experts(nn.Module):
    """Each sample goes to one of two experts, by the sign of its first feature; blocks may be
    skipped whole."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(6, 3)
        self.residual = residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.begin(x))

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.tanh(self.first(x))], 1)

    def chain(self) -> list[Any]:
        return [("begin", ["first"]), ("mix", ["experts", "last"])]

    def mix(self, both: torch.Tensor) -> torch.Tensor:
        x, h = both[:, :6], both[:, 6:]
        out = h if self.residual else torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(h[rows]))
        return self.last(out)


def experts() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return Experts(residual=True)


class Tasks(nn.Module):
    """A head of its own for each task; a task that no sample has leaves its head out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.begin(x))

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :1], torch.tanh(self.body(x))], 1)

    def chain(self) -> list[Any]:
        return [("begin", ["body"]), ("head", ["heads"])]

    def head(self, both: torch.Tensor) -> torch.Tensor:
        x, h, out = both[:, :1], both[:, 1:], both.new_zeros(len(both), 3)
        task = (x[:, 0] > -0.5).long() + (x[:, 0] > 0.5).long()
        for number in task.unique().tolist():
            rows = (task == number).nonzero()[:, 0]
            out = out.index_add(0, rows, self.heads[number](h[rows]))
        return out


def tasks() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return Tasks()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Depth(nn.Module):
    """Samples pass through as many blocks as they need; a block that no sample needs is not
    called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        need = (x[:, 1] * 2).round().clamp(0, 3)
        for number, block in enumerate(self.blocks):
            rows = (need > number).nonzero()[:, 0]
            if len(rows):
                x = x.index_copy(0, rows, block(x[rows]))
        return self.last(x)


def depth() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return Depth()


class Running(nn.Module):
    """Keeps a running mean of its input, as a normalization does, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


def running_mean() -> nn.Module:
    return nn.Sequential(Running(), *mlp())


class Calls(nn.Module):
    """Counts its calls in training, as a warm-up or an exponential schedule in a layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return x


def counting() -> nn.Module:
    return mlp(Calls())


class Masked(nn.Module):
    """Buffers that are views: transposed, and expanded from one row."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8, 8).triu().T)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8).expand(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.mask * self.scale)


def masked() -> nn.Module:
    return mlp(Masked())


def orthogonal() -> nn.Module:
    model = mlp()
    parametrizations.orthogonal(model[2])
    return model


def weight_norm() -> nn.Module:
    model = mlp()
    parametrizations.weight_norm(model[2])
    return model


def old_weight_norm() -> nn.Module:
    model = mlp()
    nn.utils.weight_norm(model[2])
    return model


def spectral_norm() -> nn.Module:
    model = mlp()
    torch.default_generator.manual_seed(1)
    parametrizations.spectral_norm(model[2])
    return model


def old_spectral_norm() -> nn.Module:
    model = mlp()
    torch.default_generator.manual_seed(1)
    nn.utils.spectral_norm(model[2])
    return model


def batch_norm() -> nn.Module:
    return mlp(nn.BatchNorm1d(8)).double()


def sync_batch_norm() -> nn.Module:
    return mlp(nn.SyncBatchNorm(8))


def group_norm() -> nn.Module:
    return mlp(nn.GroupNorm(2, 8))


def channels_last() -> nn.Module:
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Recurrent(nn.Module):
    """A GRU over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.last = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed: PackedSequence = pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.last(out[torch.arange(len(out)), lengths - 1])


def recurrent() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return Recurrent()


def transformer() -> nn.Module:
    torch.default_generator.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.Linear(2, 8), layer, nn.Flatten(), nn.Linear(24, 3)
    )


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class Structured(nn.Module):
    """Gives its two outputs as a dict, a tuple, a list or a dataclass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.last, self.kind = nn.Linear(6, 8), nn.Linear(8, 3), kind

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.body(x))
        logits = self.last(h)
        if self.kind == "dict":
            return {"logits": logits, "hidden": h}
        if self.kind == "dataclass":
            return Output(logits, h)
        return (logits, h) if self.kind == "tuple" else [logits, h]


def structured(kind: str) -> nn.Module:
    torch.default_generator.manual_seed(0)
    return Structured(kind)


class Scalars(nn.Module):
    """Parameters without a dimension and without an element."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.empty = (
            nn.Parameter(torch.tensor(0.7)),
            nn.Parameter(torch.zeros(0, 8)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.temperature + self.empty.sum()


def scalars() -> nn.Module:
    return mlp(Scalars())


def double() -> nn.Module:
    return mlp().double()


class Language(nn.Module):
    """Six tokens in, logits of the next ones out; computes its own loss where it is given
    labels."""

    def __init__(self, own_loss: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)
        self.own_loss = own_loss

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(torch.tanh(self.embedding(tokens)))
        if not self.own_loss:
            return logits
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def language(**options: bool) -> nn.Module:
    torch.default_generator.manual_seed(0)
    return Language(**options)


def bag() -> nn.Module:
    """Words whose embeddings are added up, with sparse gradients."""
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(7, 6, mode="sum", sparse=True), nn.Tanh(), nn.Linear(6, 3))


class Encoder(nn.Module):
    """Has parts that its user calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.tanh(self.encode(x)))


def encoder() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return Encoder()

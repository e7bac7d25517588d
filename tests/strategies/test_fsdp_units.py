"""fsdp where ranks use other parts of the model: experts, heads of tasks, skipped blocks; and
layers that nobody uses. What is gathered together."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import FSDP, Callback, Mesh, PerTarget, SupervisedRunner, UserError
from tests.reference import relative_difference
from tests.strategies.test_fsdp import small_gpt
from tests.worlds import in_world

pytestmark = pytest.mark.serial


class Routed(nn.Module):
    """Each sample passes one of three experts, by its first feature; `way` says how the experts are
    called."""

    def __init__(self, way: str = "in order") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
            for _ in range(3)
        )
        self.last = nn.Linear(4, 2)
        self.unused = nn.ModuleList([nn.Linear(3, 3)])
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        expert = (x[:, 0] > -0.4).long() + (x[:, 0] > 0.4).long()
        if self.way == "all at once":  # called on every rank, and used for the loss on some
            made = [e(h) for e in self.experts]
            return self.last(
                torch.stack([made[k][row] for row, k in enumerate(expert.tolist())]) * self.scale
            )
        order = [2, 0, 1] if self.way == "other order" else [0, 1, 2]
        for _ in range(2 if self.way == "twice" else 1):
            for k in order:
                rows = (expert == k).nonzero()[:, 0]
                if len(rows):
                    h = h.index_copy(0, rows, self.experts[k](h[rows]).mul_(self.scale))
        return self.last(h)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 4, generator=generator), torch.randn(24, 2, generator=generator)
    # A rank has few of them.
    x[:, 0] = torch.tensor([-1.0, 0, 1, -1, 0, 0, 1, 1, -1, -1, 1, 0]).repeat_interleave(2)
    return TensorDataset(x, y)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def by_hand(model: nn.Module, batch: int) -> dict[str, torch.Tensor]:
    optimizer, samples = momentum(model), data()
    for _ in range(2):
        for first in range(0, 24, batch):
            x, y = samples[first : first + batch]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


def train(strategy: Any, way: str, shares: int, accumulate: int = 1, **options: Any) -> float:
    """The largest difference from the loop by hand, over batches of 4 samples."""
    model = Routed(way)
    loader = DataLoader(data(), batch_size=4 // shares // accumulate)
    options = {"accumulate": accumulate, "num_epochs": 2, "distributed": strategy} | options
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=momentum(model),
        loaders={"train": loader},
        **options,
    )
    return relative_difference(model.state_dict(), by_hand(Routed(way), 4))


def train_each() -> dict[str, float]:
    """On two workers: units called in several ways, units inside of units, and layers that are
    computed again."""
    found = {
        way: train(FSDP(), way, 2) for way in ("in order", "other order", "twice", "all at once")
    }
    wrap = ["experts.0", "experts.0.1", "experts.1.1", "experts.2", "unused.0"]
    found["nested"] = train(FSDP(wrap=wrap), "in order", 2)
    found["recomputed, 2 micro-batches"] = train(
        FSDP(activation_checkpointing=True), "in order", 2, 2
    )
    return found


# rare: conformance has a mixture of experts under fsdp.
@pytest.mark.rare
def test_experts_that_some_ranks_use() -> None:
    for found in in_world(2, train_each):
        assert max(found.values()) <= 1e-5, found


def test_shards_and_replicas() -> None:
    assert max(in_world(4, train, Mesh(dp={"replicate": 2, "shard": 2}), "in order", 4)) <= 1e-5


def refused(runner: type[SupervisedRunner]) -> str:
    model = Routed()
    loader = DataLoader(data(), batch_size=4)
    with pytest.raises(UserError) as caught:
        runner(device="cpu").train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=momentum(model),
            loaders={"train": loader},
            distributed="fsdp",
        )
    return str(caught.value)


class PartCalled(SupervisedRunner):
    def handle_batch(self, model: nn.Module, batch: Any) -> Any:
        return model.experts[0](batch[0])[:, :2], batch[1]


class Hidden:
    """An object in which nobody can see a tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Wrapping(Routed):
    def forward(self, x: torch.Tensor) -> Any:
        return Hidden(super().forward(x))


def refused_output() -> str:
    model = Wrapping()
    with pytest.raises(UserError) as caught:
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=lambda output, y: nn.functional.mse_loss(output.value, y),
            optimizer=momentum(model),
            loaders={"train": DataLoader(data(), batch_size=4)},
            distributed="fsdp",
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "args", "said"),
    [
        (
            refused,
            (PartCalled,),
            "gathers 'experts.0' within a call of the model, and it is called outside of one",
        ),
        (
            refused_output,
            (),
            "the loss has no gradient with respect to the tensors in the model's output",
        ),
    ],
)
def test_what_cannot_be_gathered_is_refused(
    call: Callable[..., str], args: tuple[Any, ...], said: str
) -> None:
    for message in in_world(2, call, *args):
        assert said in message


def _output_in_backward() -> list[bool]:
    """On each rank: whether the model's output is gone as the backward pass of a step goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    outputs: list[weakref.ref[torch.Tensor]] = []
    gone: list[bool] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        outputs.append(weakref.ref(output))
        # a copy, so that the loss's own backward pass has no need of the output
        kept = output.clone()
        kept.register_hook(lambda grad: gone.append(outputs[-1]() is None))
        return nn.functional.cross_entropy(kept, target)

    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=PerTarget(loss),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        distributed=FSDP(),
        datasets={
            "batch_size": 4,
            "train": TensorDataset(torch.randn(32, 4), torch.randint(3, (32,))),
        },
        callbacks=[WithoutGarbageCollection()],
    )
    return gone


class WithoutGarbageCollection(Callback):
    def on_train_start(self, training: Any) -> None:
        gc.disable()

    def on_train_end(self, training: Any) -> None:
        gc.enable()


def test_the_output_is_let_go_of_before_the_backward_pass() -> None:
    # it is the largest tensor of a language model
    for gone in in_world(2, _output_in_backward):
        assert len(gone) > 1
        assert all(gone[1:])  # the first step's is looked at


def names(strategy: FSDP, model: nn.Module) -> list[str]:
    return [name for name, _ in strategy.units(model)]


class TestWhatIsGatheredTogether:
    def test_layers_of_lists(self) -> None:
        assert names(FSDP(), small_gpt()) == ["layers.0", "layers.1"]
        assert names(FSDP(), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == [
            "0",
            "2",
        ]

    def test_names_of_classes_and_modules(self) -> None:
        assert names(FSDP(wrap="Attention"), small_gpt()) == ["layers.0.attn", "layers.1.attn"]
        assert names(FSDP(wrap=["Layer", "layers.1.mlp"]), small_gpt()) == [
            "layers.1.mlp",
            "layers.0",
            "layers.1",
        ]

    def test_size(self) -> None:
        model = nn.Sequential(
            nn.Linear(10, 10), nn.Sequential(nn.Linear(3, 3), nn.Linear(10, 9)), nn.Linear(2, 2)
        )
        assert names(FSDP(wrap={"min_params": 100}), model) == ["0", "1"]
        assert names(FSDP(wrap={"min_params": 90}), model) == ["0", "1.1"]

    def test_tied_weights_stay_together(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        assert names(FSDP(), model) == ["1"]
        with pytest.raises(
            UserError,
            match=r"'0', whose parameter 'weight' is also used outside of it \(tied weights\)",
        ):
            names(FSDP(wrap=["0"]), model)

    @pytest.mark.parametrize(
        ("wrap", "said"),
        [
            (["Leyer"], "no class of that name; did you mean 'Layer'?"),
            (["layers"], "'layers', a ModuleList, which is never called; name its members"),
        ],
    )
    def test_names_that_fit_nothing(self, wrap: list[str], said: str) -> None:
        with pytest.raises(UserError) as caught:
            names(FSDP(wrap=wrap), small_gpt())
        assert said in str(caught.value)

    @pytest.mark.parametrize("wrap", [{"min_params": 0}, {"size": 5}, [], 7, [7]])
    def test_what_is_no_wrapping(self, wrap: Any) -> None:
        with pytest.raises(UserError, match="wrap="):
            FSDP(wrap=wrap)

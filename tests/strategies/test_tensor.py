"""Slices of layers on 2, 3 and 4 workers against the plain model in one process. One start of four
processes for all of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from allhands import Mesh, Tensor, UserError, load_checkpoint
from allhands.models import NextToken
from tests.reference import global_batches, relative_difference, train_by_hand
from tests.strategies.sliced_models import (
    LENGTH,
    SAMPLES,
    VOCAB,
    features,
    gpt,
    mlp,
    sgd,
    tokens,
    train,
)
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]

PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "by name": {
        "plan": {
            "layers.*.attn.qkv": "colwise",
            "layers.*.attn.out": "rowwise",
            "head": "vocab",
            "embed": "vocab",
        }
    },
    "sequence": {"sequence_parallel": True},
    "loss": {"loss_parallel": True},
    "both": {"sequence_parallel": True, "loss_parallel": True},
}


def resumed_by_hand() -> dict[str, torch.Tensor]:
    """Two epochs of steps of 6 samples, and two of steps of 12."""
    model = gpt()
    optimizer = sgd(model)
    small, large = global_batches(SAMPLES, 6, 42), global_batches(SAMPLES, 12, 42)
    train_by_hand(model, NextToken(), optimizer, tokens(), small, 8, clip_norm=0.5)
    for _ in range(4):
        next(large)
    train_by_hand(model, NextToken(), optimizer, tokens(), large, 4, clip_norm=0.5)
    return model.state_dict()


# ----------------------------------------------------------------- sliced models without the runner


def sliced(
    tensor: Tensor, model: nn.Module, mesh: DeviceMesh
) -> tuple[Any, dict[str, torch.Tensor]]:
    model = copy.deepcopy(model)
    return model, tensor.parallelize(model, mesh, tensor.check_model(model, mesh.size()))


def compared(
    mesh: DeviceMesh,
    options: dict[str, Any],
    make: Callable[..., nn.Module],
    data: Any,
    criterion: Any,
) -> float:
    """After 5 steps in float64, the largest difference of any parameter to the plain model's."""
    plain, (x, y) = make().double(), data
    tensor = Tensor(**options)
    model, orders = sliced(tensor, plain, mesh)
    for each, call in ((plain, criterion), (model, tensor.loss_function(criterion))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            call(each(x), y).backward()
            optimizer.step()
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole = parameter.full_tensor().detach()
        found[name] = (
            torch.empty_like(whole).index_copy_(0, orders[name], whole) if name in orders else whole
        )
    return relative_difference(
        found, {n: p.detach() for n, p in plain.named_parameters(remove_duplicate=False)}
    )


def losses(mesh: DeviceMesh) -> dict[str, float]:
    """The largest difference of a split cross entropy and its gradient to PyTorch's own, by
    case."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    weight = torch.rand(10, generator=generator, dtype=torch.float64)
    for shape in ((7, 10), (3, 10, 4), (10,)):
        logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        target = torch.randint(
            10, (*shape[:1], *shape[2:]) if len(shape) > 1 else (), generator=generator
        )
        if target.dim():
            target.view(-1)[::3] = 4
        for options in (
            {},
            {"reduction": "sum"},
            {"reduction": "none"},
            {"ignore_index": 4, "weight": weight},
            {"label_smoothing": 0.2, "weight": weight, "ignore_index": 4},
            {"label_smoothing": 0.3, "reduction": "sum"},
        ):
            if not target.dim() and "ignore_index" in options:
                continue  # nothing would count
            plain = logits.clone().requires_grad_()
            expected: torch.Tensor = F.cross_entropy(plain, target, **options)
            expected.sum().backward()
            dim = 1 if len(shape) > 1 else 0
            length = -(-10 // mesh.size())
            rank = mesh.get_local_rank()
            own = (
                logits.narrow(dim, rank * length, max(0, min(length, 10 - rank * length)))
                .clone()
                .requires_grad_()
            )
            whole = DTensor.from_local(
                own, mesh, [Shard(dim)], shape=logits.shape, stride=logits.stride()
            )
            call = functools.partial(F.cross_entropy, **options)
            loss = Tensor(loss_parallel=True).loss_function(call)(whole, target)
            loss.sum().backward()
            assert plain.grad is not None
            gradient = plain.grad.narrow(dim, rank * length, own.shape[dim])
            assert own.grad is not None
            difference = max(
                float((loss - expected).abs().max()), float((own.grad - gradient).abs().max())
            )
            found[f"{shape} {options}"] = difference
    return found


def refused(mesh: DeviceMesh) -> dict[str, str]:
    """What a forward pass or a loss refuses."""
    x, y = tokens()

    class Chain(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            self.names = names
            for name in names:
                self.add_module(name, nn.LayerNorm(8) if name == "norm" else nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in self.names:
                x = getattr(self, name)(x)
            return x

    def said(act: Callable[[], Any]) -> str:
        try:
            act()
        except (UserError, IndexError) as error:
            return str(error)
        return "nothing"

    def forward(names: tuple[str, ...], plan: dict[str, str]) -> str:
        return said(lambda: sliced(Tensor(plan), Chain(*names), mesh)[0](torch.randn(3, 8)))

    tensor = Tensor(loss_parallel=True)
    model, _ = sliced(tensor, gpt(), mesh)
    return {
        "open at the end": forward(("a",), {"a": "colwise"}),
        "a norm inside": forward(("a", "norm", "b"), {"a": "colwise", "b": "rowwise"}),
        "colwise twice": forward(("a", "b"), {"a": "colwise", "b": "colwise"}),
        "rowwise alone": forward(("a",), {"a": "rowwise"}),
        "token": said(lambda: model(x + 30)),
        "few tokens": said(
            lambda: sliced(Tensor(sequence_parallel=True), gpt(), mesh)[0](x[:, :5])
        ),
        "target": said(lambda: tensor.loss_function(NextToken())(model(x), y.clamp_min(0) + 30)),
        "probabilities": said(
            lambda: tensor.loss_function(nn.CrossEntropyLoss())(
                model(x).flatten(0, 1), torch.rand(SAMPLES * LENGTH, VOCAB)
            )
        ),
        "another loss": said(
            lambda: tensor.loss_function(lambda output, _: output.full_tensor().mean())(model(x), y)
        ),
    }


class Dropped(nn.Module):
    """Dropout on parts of the features, between two Linear modules, and on whole ones after
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down, self.outer = (
            nn.Linear(4, 64),
            nn.Dropout(0.5),
            nn.Linear(64, 64),
            nn.Dropout(0.5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = self.inner(self.up(x))
        return self.outer(self.down(self.mask))


def dropout(mesh: DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(3)
    plain = Dropped()
    nn.init.ones_(plain.up.bias)
    model, _ = sliced(Tensor({"up": "colwise", "down": "rowwise"}), plain, mesh)
    x = torch.zeros(2, 4)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        output = model(x)
        mask, after = model.mask.detach().clone(), torch.rand(3)
        output.square().sum().backward()
        gradient = model.down.weight.grad.full_tensor().clone()
        model.zero_grad()
        torch.manual_seed(11)
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
        same_again = torch.equal(gradient, model.down.weight.grad.full_tensor())
    gpts = {}
    for name in ("plain", "sequence"):
        tensor = Tensor(**PLANS[name])
        model, _ = sliced(tensor, gpt(dropout=0.4), mesh)
        gradients = []
        for _ in range(2):
            with torch.random.fork_rng():
                torch.manual_seed(12)
                gpts[name] = model(tokens()[0][:2])
                gpts[name].square().mean().backward()
            gradients.append(
                [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
            )
            model.zero_grad()
            # The second time, they are computed again in the backward pass.
            for layer in model.layers:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        same_again &= all(map(torch.equal, *gradients))
        gpts[name] = gpts[name].detach()
    return {
        "output": output.detach(),
        "mask": mask,
        "after": after,
        "same again": same_again,
        **gpts,
    }


def encoder(mesh: DeviceMesh) -> float:
    """PyTorch's own encoder layers, whose attention stays whole: outputs, gradients, and outputs in
    evaluation."""
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2
    ).double()
    model, _ = sliced(
        Tensor({"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"}), plain, mesh
    )
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    expected, found = plain(x), model(x)
    expected.square().sum().backward()
    found.square().sum().backward()
    differences = [found - expected]
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        differences.append(one.grad - other.grad.full_tensor())
    with torch.no_grad():
        differences.append(plain.eval()(x) - model.eval()(x))
    return max(float(difference.detach().abs().max()) for difference in differences)


def everything(logdir: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["saved"], _ = train("tensor 4", 2, logdir=logdir)
    found["resumed"], _ = train("tensor 4", 4, Mesh(dp=2, tp=2), logdir=logdir, resume="auto")
    for size in (3, 4):  # trainings are on 2 and 4
        mesh = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("tp",))
        if mesh.get_coordinate() is None:
            continue
        found[f"{size} losses"] = losses(mesh)
        if size == 3:
            for name, options in PLANS.items():
                found[name] = compared(mesh, options, gpt, tokens(), NextToken())
            found["mlp"] = compared(
                mesh, {}, mlp, (features()[0].double(), features()[1]), nn.CrossEntropyLoss()
            )
    # Here `mesh` is the whole world's.
    return found | {"refused": refused(mesh), "dropout": dropout(mesh), "encoder": encoder(mesh)}


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("sliced"))


@pytest.fixture(scope="module")
def results(logdir: str) -> list[dict[str, Any]]:
    """What each rank found."""
    return in_world(4, everything, logdir)


def test_a_checkpoint_of_slices_goes_on_on_another_mesh_and_alone(
    results: list[dict[str, Any]], logdir: str
) -> None:
    """It holds q, k and v in the model's own order, and the optimizer's momentum likewise."""
    expected = resumed_by_hand()
    for found in results:
        assert relative_difference(found["resumed"], expected) < 1e-6
    model = gpt()
    model.load_state_dict(load_checkpoint(Path(logdir))["model"])
    assert all(
        torch.equal(value, results[0]["resumed"][name])
        for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize("name", [*PLANS, "mlp"])
def test_slices_on_three_workers_compute_what_the_whole_model_does(
    results: list[dict[str, Any]], name: str
) -> None:
    for found in results[:3]:
        assert found[name] < 1e-12


def test_pytorchs_encoder_layers_are_sliced_with_their_attention_whole(
    results: list[dict[str, Any]],
) -> None:
    for found in results:
        assert found["encoder"] < 1e-12


@pytest.mark.parametrize("size", [3, 4])
def test_a_split_cross_entropy_is_pytorchs(results: list[dict[str, Any]], size: int) -> None:
    assert len(results[0][f"{size} losses"]) == 16
    for found in results[:size]:
        assert max(found[f"{size} losses"].values()) < 1e-12


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "open at the end",
            "'a' is colwise, and no rowwise module brings its parts together again",
        ),
        (
            "a norm inside",
            "'norm' (replicate) runs after 'a' (colwise) and before a rowwise module",
        ),
        ("colwise twice", "'b' (colwise) takes 8 features and got 2"),
        (
            "rowwise alone",
            "'a' (rowwise) takes this worker's part of the features, 2 of 8, and got 8",
        ),
        ("token", "'embed' has 37 rows, and got tokens from"),
        (
            "few tokens",
            "splits 5 tokens over tp=4, which leaves 1 of the workers without any; set tp to 3 or "
            "less",
        ),
        ("target", "a target is not from 0 to 36"),
        ("probabilities", "set loss_parallel=False"),
        ("another loss", "loss_parallel=True is for a criterion that calls cross_entropy"),
    ],
)
def test_what_a_plan_gets_wrong_is_refused_in_the_first_forward_pass(
    results: list[dict[str, Any]], case: str, message: str
) -> None:
    for found in results:
        assert message in found["refused"][case]


def test_dropout_is_the_same_where_activations_are_and_apart_where_they_are_not(
    results: list[dict[str, Any]],
) -> None:
    first, *others = (found["dropout"] for found in results)
    masks = {tuple(found["dropout"]["mask"].flatten().tolist()) for found in results}
    assert len(masks) == 4
    for found in others:
        for name in ("output", "after", "plain", "sequence"):
            assert torch.equal(found[name], first[name]), name
    assert all(found["dropout"]["same again"] for found in results)

"""Compiled models: the training that an eager one is, and the model as it was afterwards. The
compiler is PyTorch's own."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import DDP, DP, FSDP, Callback, Pipeline, SupervisedRunner, Tensor, UserError
from allhands.launch import spawn
from allhands.loop import compiling
from allhands.step import compiled
from allhands.step.compiled import compiler_missing
from allhands.world import World
from tests.noise import rounding_limit
from tests.reference import relative_difference
from tests.worlds import in_world

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    compiler_missing(CPU) is not None,
    reason="torch.compile needs g++ and the headers of Python (python3-dev) on a CPU",
)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(nn.functional.gelu(self.inner(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.last = nn.Linear(width, 4)

    def chain(self) -> list[str]:
        return ["first", "blocks.0", "blocks.1", "last"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator),
        torch.randint(0, 4, (samples,), generator=generator),
    )


def train(
    step: str, samples: int = 96, device: str = "cpu", **changes: Any
) -> tuple[nn.Module, Any]:
    width = changes.pop("width", 16)
    model = changes.pop("model") if "model" in changes else Network(width)
    given: dict[str, Any] = {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "loaders": {"train": DataLoader(data(samples), 8, shuffle=True)},
        "clip_norm": 0.5,
        "num_epochs": 2,
        "step": step,
    }
    history = SupervisedRunner(device=device).train(**given | changes)
    return model, history


def compiled_modules(model: nn.Module) -> list[str]:
    return [
        name for name, module in model.named_modules() if module._compiled_call_impl is not None
    ]


class Watches(Callback):
    """Which modules were compiled during the training, and how many graphs the compiler has made of
    them."""

    def __init__(self, fail_at: int = 0) -> None:
        self.modules: list[str] = []
        self.keys: list[str] = []
        self.fail_at = fail_at

    def on_train_start(self, training: Any) -> None:
        counters.clear()

    def on_step_end(self, training: Any) -> None:
        self.modules, self.keys = (
            compiled_modules(training.model),
            list(training.model.state_dict()),
        )
        self.graphs = counters["stats"]["unique_graphs"]
        if training.step == self.fail_at:
            raise ArithmeticError("of the callback's own")


@needs_compiler
def test_a_compiled_training_is_the_eager_one_to_rounding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With dropout, accumulation, a short last batch and evaluation; 20 steps."""
    watch = Watches()
    loaders = {"train": DataLoader(data(77), 8, shuffle=True), "valid": DataLoader(data(72), 8)}

    def result(step: str, *callbacks: Callback) -> dict[str, torch.Tensor]:
        model, history = train(
            step,
            samples=77,
            accumulate=2,
            num_epochs=4,
            loaders=loaders,
            callbacks=list(callbacks),
            model=models.pop(),
        )
        assert history["step"][-1] == 20
        return {**model.state_dict(), "the loss": torch.tensor(history["valid"]["loss"])}

    models = [Network() for _ in range(10)]
    model = models[-1]
    found = result("compile", watch)
    said = capsys.readouterr().out
    expected = result("eager")
    assert relative_difference(found, expected) < rounding_limit(
        lambda nudge: result("eager", nudge), expected
    )
    assert "step: the whole model and the loss compiled" in said
    assert "eager, since" not in said, "on a CPU nothing is said of graphs"
    assert watch.modules == [""]
    assert watch.graphs >= 2, "one for full batches, one for the short one"
    assert watch.keys == list(model.state_dict())
    assert compiled_modules(model) == []


@needs_compiler
def test_a_resumed_training_draws_the_same_dropout(tmp_path: Path) -> None:
    whole, _ = train("compile", num_epochs=2)
    train("compile", num_epochs=1, logdir=tmp_path)
    resumed, _ = train("compile", num_epochs=2, logdir=tmp_path, resume="auto")
    assert all(
        torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items()
    )


def limit() -> float:
    """How far rounding may move the trainings of two workers below, which are this one."""
    return rounding_limit(
        lambda nudge: train("eager", callbacks=[nudge])[0].state_dict(),
        train("eager")[0].state_dict(),
    )


def in_two(strategies: list[Any]) -> list[Any]:
    found = []
    for strategy in strategies:
        watch = Watches()
        model, _ = train("compile", distributed=strategy, callbacks=[watch])
        expected, _ = train("eager", distributed=strategy)
        found.append(
            (
                relative_difference(model.state_dict(), expected.state_dict()),
                watch.modules,
                watch.graphs,
            )
        )
    return found


@needs_compiler
@pytest.mark.serial
def test_workers_compile_layers_or_the_whole() -> None:
    bound = limit()
    for number, rank in enumerate(in_world(2, in_two, [DDP(), FSDP(), "local_sgd", Pipeline()])):
        ddp, fsdp, local_sgd, pipeline = rank
        for difference, _, graphs in rank:
            assert difference < bound
            assert graphs >= 1
        assert ddp[1] == fsdp[1] == ["blocks.0", "blocks.1"], (
            "so that gradients are exchanged while others are computed"
        )
        assert local_sgd[1] == [""]
        assert pipeline[1] == [f"blocks.{number}"]


# rare: the test before compiles on workers, and conformance has servers.
@pytest.mark.rare
@needs_compiler
@pytest.mark.serial
def test_workers_that_servers_train() -> None:
    model, _ = train("compile", distributed="kvstore", workers=2)
    expected, _ = train("eager", distributed="kvstore", workers=2)
    assert relative_difference(model.state_dict(), expected.state_dict()) < limit()


@needs_compiler
def test_an_error_leaves_the_model_as_it_was() -> None:
    model, watch = Network(), Watches(fail_at=1)
    with pytest.raises(ArithmeticError, match="own"):
        train("compile", model=model, callbacks=[watch])
    assert watch.modules == [""]
    assert compiled_modules(model) == []
    assert torch._dynamo.config.recompile_limit == 8


@torch.library.custom_op("allhands_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class Opaque(nn.Linear):
    """Calls an operation of which the compiler does not know the output's shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return halved(super().forward(x))


@needs_compiler
def test_a_model_that_the_compiler_cannot_take_is_refused_with_the_line() -> None:
    model = nn.Sequential(nn.Linear(6, 4), Opaque(4, 4))
    with pytest.raises(
        UserError,
        match=r"step='compile': the model cannot be compiled.*test_compiled.py:\d+ \(return halved",
    ):
        train("compile", model=model)
    assert compiled_modules(model) == []


@needs_compiler
def test_an_error_of_the_model_is_its_own() -> None:
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("of the model")

    with pytest.raises(KeyError, match="of the model"):
        train("compile", model=Fails(6, 4))


def test_without_a_compiler_it_is_refused_before_the_first_step() -> None:
    match = r"there is no C\+\+ compiler.*install g\+\+.*or write step='auto'"
    with (
        inductor_config.patch({"cpp.cxx": ("/nowhere/compiler",)}),
        pytest.raises(UserError, match=match),
    ):
        train("compile")


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("zero_bubble", "takes the backward pass of a layer in two|needs PyTorch 2.13"),
        (Pipeline(), "the layers in a list are compiled, and the model has none"),
        (Tensor(), "put together by hooks"),
        (DP(), "strategy 'dp' is not among those whose models are compiled"),
    ],
    ids=["zero_bubble", "pipeline", "tensor", "dp"],
)
def test_strategies_that_it_is_not_for(strategy: Any, reason: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(UserError, match=reason) as refusal:
        if strategy == "zero_bubble":  # an older PyTorch refuses it as it is made
            strategy = Pipeline(schedule="zero_bubble")
        workers = None if strategy.name == "dp" else 2
        train("compile", model=model, distributed=strategy, workers=workers)
    if "needs PyTorch" not in str(refusal.value):
        assert str(refusal.value).startswith("step='compile': ")
        assert "write step='auto'" in str(refusal.value)


def test_a_model_that_is_compiled_already() -> None:
    with pytest.raises(UserError, match=r"pass the model itself \(model._orig_mod\)"):
        train("compile", model=torch.compile(Network()))


@pytest.mark.parametrize(("kind", "models"), [("model", 1), ("layers", 1), ("only layers", 0)])
def test_layers_without_parts_are_compiled_as_one(
    kind: str, models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stage of a pipeline that has no layer, nothing is compiled but the loss."""
    model, loss = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), nn.MSELoss()
    group: Any = types.SimpleNamespace(
        model=model,
        world=World(0, 0, 0, 1, 1, CPU, "none", "alone"),
        captured=None,
        modules_here=lambda names: [(name, model.get_submodule(name)) for name in names],
        settings=types.SimpleNamespace(model=model, step="compile"),
        strategy=types.SimpleNamespace(
            compile_refused=lambda workers: None, compiled=lambda workers: kind
        ),
    )
    monkeypatch.setattr(compiling, "Compiled", lambda modules, *_: list(modules))
    said: list[str] = []
    found: Any = compiling.compiling(group, [loss], said.append)
    assert found == [*[model] * models, loss]


def test_names_of_the_users_script_are_seen_by_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A class from `__main__` comes to a worker with globals that are of no module."""
    home = types.ModuleType("script")
    home.here = "its own"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "script", home)
    names = {"__name__": "script", "here": "another", "helper": 3}
    kind = type(
        "FromScript",
        (nn.Linear,),
        {"forward": types.FunctionType((lambda self, x: x).__code__, names)},
    )
    with compiled.ExitStack() as stack:
        compiled._show_globals(nn.Sequential(kind(2, 2)), stack)
        assert vars(home)["helper"] == 3
        assert vars(home)["here"] == "its own"
    assert not hasattr(home, "helper")


# ------------------------------------------------------------------ on GPUs


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_on_a_gpu_compiled_steps_are_captured(
    precision: str, tolerance: float, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {
        "device": "cuda",
        "samples": 101,
        "num_epochs": 3,
        "precision": precision,
        "width": 64,
    }
    expected, eager = train("eager", **given)
    capsys.readouterr()
    model, history = train("compile", **given)
    said = capsys.readouterr().out
    print(said)
    assert "step: the whole model and the loss compiled" in said
    assert "captured in a CUDA graph" in said
    if (
        precision == "fp32"
        # what is compiled rounds to bf16 less often than what is eager, and its weights are 0.1
        # apart
    ):
        assert relative_difference(model.state_dict(), expected.state_dict()) < tolerance
    assert history["train"]["loss"] == pytest.approx(eager["train"]["loss"], rel=tolerance)
    assert compiled_modules(model) == []


def on_cards(strategy: Any, precision: str) -> tuple[float, float, list[str], int]:
    allhands.init(device="cuda")
    try:
        watch = Watches()
        given: dict[str, Any] = {
            "device": "cuda",
            "num_epochs": 3,
            "precision": precision,
            "width": 64,
            "distributed": strategy,
        }
        model, history = train("compile", callbacks=[watch], **given)
        expected, eager = train("eager", **given)
        losses = abs(history["train"]["loss"][-1] / eager["train"]["loss"][-1] - 1)
        return (
            relative_difference(model.state_dict(), expected.state_dict()),
            losses,
            watch.modules,
            watch.graphs,
        )
    finally:
        allhands.finalize()


@pytest.mark.gpu(2)
@pytest.mark.serial
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
@pytest.mark.parametrize("strategy", [DDP(), FSDP()], ids=["ddp", "fsdp"])
def test_on_two_gpus_layers_are_compiled(strategy: Any, precision: str, tolerance: float) -> None:
    for weights, losses, modules, graphs in spawn(on_cards, (strategy, precision), workers=2):
        assert (weights if precision == "fp32" else losses) < tolerance
        assert modules == ["blocks.0", "blocks.1"]
        assert graphs >= 1

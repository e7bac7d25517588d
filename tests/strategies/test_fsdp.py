"""Sharded training: parity on three workers, checkpoints between strategies, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, FSDP, Callback, Mesh, Single, SupervisedRunner, UserError
from allhands.loop.checkpoint import load
from allhands.models import GPT, MLP
from allhands.strategies import Strategy, fsdp
from allhands.strategies.repoint import check_optimizer
from tests.reference import global_batches, relative_difference, train_by_hand
from tests.runner.problems import StopAt
from tests.worlds import in_world


def small_gpt(vocabulary: int = 20) -> nn.Module:
    torch.manual_seed(3)
    return GPT(vocab_size=vocabulary, block_size=4, layers=2, heads=2, width=8)


class Tail(nn.Module):
    """A linear layer, a frozen one, a scalar parameter, one that is never used, and a norm with
    statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 7)])
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.linspace(0, 1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x).relu())
        return self.frozen(x) * self.gain + self.shift


def tensors(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(samples, 6, generator=generator),
        torch.randint(0, 7, (samples,), generator=generator),
    )
    y[torch.rand(samples, generator=generator) < 0.3] = -100
    return x, y


# name -> (strategy, samples, batch a worker, accumulate, clip_norm, optimizer)
SGD, ADAM = (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01})
CASES: dict[str, tuple[Strategy, int, int, int, float | None, Any]] = {
    "uneven": (FSDP(), 41, 4, 1, None, ADAM),
    "accumulated and clipped": (FSDP(wrap={"min_params": 60}), 41, 2, 2, 0.3, SGD),
    "fewer samples than workers": (FSDP(reshard_after_forward=False), 2, 4, 1, 0.1, SGD),
    "one sample a batch": (
        FSDP(wrap="Linear", activation_checkpointing=True),
        11,
        1,
        3,
        None,
        ADAM,
    ),
    "copies": (Mesh(dp=3), 41, 4, 2, 0.3, SGD),
}


def trainings() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (strategy, samples, batch, accumulate, clip_norm, (kind, options)) in CASES.items():
        model = Tail()
        parameters = dict(model.named_parameters())
        optimizer = kind(model.parameters(), **options)
        loaders = {"train": DataLoader(TensorDataset(*tensors(samples)), batch)}
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=optimizer,
            distributed=strategy,
            num_epochs=20 // -(-samples // (3 * batch * accumulate)),
            accumulate=accumulate,
            clip_norm=clip_norm,
            loaders=loaders,
        )
        # The user's own objects: the same parameters as before, and the optimizer over them.
        assert all(parameters[key] is parameter for key, parameter in model.named_parameters())
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        found[name] = model.state_dict()
    found["dropout"] = draws()
    found["nan"] = not_a_number()
    return found


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn = torch.rand(2).tolist()
        return (x * self.weight).sum(1)


class Notes(Callback):
    def __init__(self) -> None:
        self.drawn: list[list[float]] = []

    def on_step_end(self, training: Any) -> None:
        self.drawn.append(training.model.drawn)


def draws() -> list[list[float]]:
    model, notes = Draws(), Notes()
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        distributed=FSDP(),
        loaders={"train": DataLoader(TensorDataset(torch.rand(6, 4), torch.rand(6)), 1)},
        callbacks=[notes],
    )
    return notes.drawn


def not_a_number() -> str:
    """A loss that is not finite on one rank, which takes part in the others' backward passes
    nonetheless."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    x = torch.rand(6, 6)
    x[3] = float("nan")
    try:
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            distributed=FSDP(),
            loaders={"train": DataLoader(TensorDataset(x, x[:, :1].nan_to_num()), 1)},
            accumulate=2,
        )
    except UserError as error:
        return str(error)
    return ""


# rare: conformance trains the same under fsdp, on uneven data.
@pytest.mark.rare
@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_shards_train_as_one_process_does() -> None:
    ranks = in_world(3, trainings)
    for name, (_, samples, batch, accumulate, clip_norm, (kind, options)) in CASES.items():
        model = Tail()
        optimizer = kind(model.parameters(), **options)
        size = 3 * batch * accumulate
        batches = global_batches(samples, size, seed=42, shuffle=False)
        train_by_hand(
            model, nn.CrossEntropyLoss(), optimizer, tensors(samples), batches, 20, clip_norm
        )
        for rank, found in enumerate(ranks):
            assert relative_difference(found[name], model.state_dict()) < 1e-6, (name, rank)
    assert len({tuple(map(tuple, found["dropout"])) for found in ranks}) == 3
    for found in ranks:
        assert "the training loss is nan on rank 1" in found["nan"]


# ------------------------------------------------------------------- checkpoints between strategies

VOCABULARY = 2003  # a prime: no number of workers divides it


class Tokens(nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def train_tokens(
    strategy: Strategy,
    logdir: str,
    epochs: int,
    shares: int,
    resume: str | None = None,
    **options: Any,
) -> Any:
    model = small_gpt(VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, VOCABULARY, (30, 4), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=Tokens(),
        optimizer=optimizer,
        scheduler=scheduler,
        num_epochs=epochs,
        distributed=strategy,
        loaders={"train": DataLoader(TensorDataset(x, x.roll(-1, 1)), 12 // shares)},
        logdir=logdir,
        resume=resume,
        **options,
    )
    momentum = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    return model.state_dict(), momentum, optimizer.param_groups[0]["lr"]


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
# rare: other numbers of workers, and meshes, which have tests of their own checkpoints.
@pytest.mark.parametrize(
    "goes_on",
    [
        [(2, FSDP()), (2, DDP()), (1, Single())],
        pytest.param(
            [(3, FSDP()), (2, Mesh(tp=2)), (2, Mesh(pp=2))], marks=pytest.mark.rare, id="rare"
        ),
    ],
)
def test_a_checkpoint_of_four_shards_goes_on_under_anything(
    goes_on: list[tuple[int, Strategy]], tmp_path: Path
) -> None:
    """From the middle of the second epoch, with the same samples, to the same weights and
    momentum."""
    weights, momentum, rate = train_tokens(
        Single(), str(tmp_path / "whole"), 3, 1, callbacks=[StopAt(100)]
    )
    left = str(tmp_path / "left")
    in_world(4, _leaving, left)
    for number, (workers, strategy) in enumerate(goes_on):
        logdir = str(tmp_path / f"on-{number}")
        resume = str(Path(left) / "checkpoints" / "last")
        shares = strategy.shares(workers)
        given = (strategy, logdir, 3, shares, resume)
        results = in_world(workers, _going_on, *given) if workers > 1 else [_going_on(*given)]
        for mine, own, last in results:
            assert relative_difference(mine, weights) < 2e-6, strategy.name
            assert relative_difference(own, momentum) < 1e-5, strategy.name
            assert last == pytest.approx(rate)
    stored = load(Path(left))
    assert stored["model"].keys() == small_gpt().state_dict().keys()
    assert stored["model"]["head.weight"].shape == (VOCABULARY, 8)


def _leaving(logdir: str) -> None:
    train_tokens(FSDP(), logdir, 3, 4, callbacks=[StopAt(4)])


def _going_on(strategy: Strategy, logdir: str, epochs: int, shares: int, resume: str) -> Any:
    return train_tokens(strategy, logdir, epochs, shares, resume, callbacks=[StopAt(100)])


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    train_tokens(Single(), str(tmp_path), 1, 1)
    for said in in_world(2, _another, str(tmp_path)):
        assert "resume: the checkpoint is of another model or optimizer" in said[0]
        assert "has no" in said[0]
        assert "shape" in said[1]


def _another(logdir: str) -> list[str]:
    said = []
    for model in (MLP(2, (4,), 2), small_gpt(VOCABULARY - 1)):
        try:
            SupervisedRunner(device="cpu").train(
                model=model,
                criterion=Tokens(),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                distributed=FSDP(),
                loaders={"train": DataLoader(TensorDataset(torch.zeros(4, 2)), 2)},
                resume=logdir,
            )
        except UserError as error:
            said.append(str(error))
    return said


# ---------------------------------------------------------------------- refused


def refuse(strategy: Strategy, optimizer: Any = None, workers: int = 2, **options: Any) -> str:
    model = Tail()
    with pytest.raises(UserError) as caught:
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=(optimizer or torch.optim.SGD)(model.parameters(), lr=0.1),
            loaders={"train": DataLoader(TensorDataset(*tensors(8)), 2)},
            distributed=strategy,
            workers=workers,
            **options,
        )
    return str(caught.value)


class Odd(torch.optim.SGD):
    pass


def test_before_any_worker_is_started() -> None:
    assert "Adafactor may need whole ones. Use one of SGD, Adam" in refuse(
        FSDP(), torch.optim.Adafactor
    )
    assert "write `elementwise = True` into the class Odd" in refuse(FSDP(), Odd)
    assert "no class of that name" in refuse(FSDP(wrap="Layer"))
    assert "pp 1 x dp 4 x tp 1 = 4, but there are 2 workers; set dp to 2, or start 4" in refuse(
        Mesh(dp=4)
    )
    assert "the device is 'cpu'; set cpu_offload to False" in refuse(
        FSDP(cpu_offload=True), workers=1
    )


def test_an_optimizer_that_says_so_is_taken() -> None:
    optimizer = Odd(Tail().parameters(), lr=0.1)
    optimizer.elementwise = True  # type: ignore[attr-defined]
    check_optimizer(optimizer, "fsdp")


def test_offloading_needs_memory() -> None:
    model = nn.Linear(1024, 1024, bias=False)
    fsdp._check_memory(model, shards=4, here=2, free=8 << 20)
    with pytest.raises(
        UserError,
        match=r"of 2 workers in this machine's memory, about 0\.0 GiB.*set cpu_offload to False",
    ):
        fsdp._check_memory(model, shards=4, here=2, free=(8 << 20) - 1)


# ---------------------------------------------------------------------- on GPUs

ON_GPUS: dict[str, tuple[Strategy, float]] = {
    "shards": (FSDP(), 1e-5),
    "offloaded": (FSDP(cpu_offload=True, wrap={"min_params": 60}), 1e-5),
    "computed again": (FSDP(activation_checkpointing=True, reshard_after_forward=False), 1e-5),
    "copies": (Mesh(dp=2), 1e-5),
    "bf16": (FSDP(param_dtype="bf16", reduce_dtype="fp32"), 3e-2),
}


def trained_on(device: str, cases: dict[str, tuple[Strategy, float]]) -> list[float]:
    """How far each is from the hand-written loop in fp32."""
    apart = []
    for strategy, _ in cases.values():
        model, plain = Tail(), Tail()
        loaders = {
            "train": DataLoader(TensorDataset(*tensors(41)), 4),
            "valid": DataLoader(TensorDataset(*tensors(41)), 20),
        }
        SupervisedRunner(device=device).train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
            distributed=strategy,
            workers=2,
            num_epochs=4,
            accumulate=2,
            clip_norm=0.3,
            loaders=loaders,
        )
        by_hand = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
        batches = global_batches(41, 16, seed=42, shuffle=False)
        train_by_hand(plain, nn.CrossEntropyLoss(), by_hand, tensors(41), batches, 12, 0.3)
        apart.append(relative_difference(model.state_dict(), plain.state_dict()))
    return apart


@pytest.mark.gpu(2)
@pytest.mark.serial
def test_two_gpus() -> None:
    for (name, (_, bound)), apart in zip(ON_GPUS.items(), trained_on("cuda", ON_GPUS), strict=True):
        assert apart < bound, name


def test_the_old_name_of_activation_checkpointing_warns() -> None:
    with pytest.warns(
        FutureWarning,
        match=r"FSDP\(checkpoint_activations=…\).*write FSDP\(activation_checkpointing=…\)",
    ):
        assert FSDP(checkpoint_activations=True).activation_checkpointing is True

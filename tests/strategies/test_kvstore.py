"""Training through a key-value store against the hand-written loop: without servers, with them, and
without waiting."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import allhands
from allhands import DDP, Callback, KVStore, SupervisedRunner, UserError, WorkerError
from allhands.launch import spawn
from tests.reference import global_batches, relative_difference, train_by_hand
from tests.runner.problems import StopAt, classification, classifier
from tests.strategies.kvstore_training import BATCH, EPOCHS, SAMPLES, by_hand, make_optimizer, train

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]

RARE = 1.5  # two of the samples have more in their first number

LOSSY: dict[str, dict[str, Any]] = {
    "both ways": {"compress": {"name": "topk", "keep": 0.3}},
    "one way": {"compress": {"name": "1bit", "pull": "none"}},
    "in the workers": {
        "compress": {"name": "topk", "keep": 0.3, "pull": "none"},
        "update": "worker",
    },
}


class Routed(nn.Module):
    """Of which a part is used by few samples: in some steps by one rank alone, in most by none."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.few = classifier(), classifier()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, chosen = self.all(x), x[:, 0] > RARE
        return (
            out.index_add(0, chosen.nonzero().view(-1), self.few(x[chosen]))
            if chosen.any()
            else out
        )


def routed(strategy: Any, size: int) -> float:
    """The difference from the loop by hand, in which Adam leaves out what has no gradient."""
    models = [Routed(), Routed()]
    first, second = (torch.optim.Adam(model.parameters(), lr=0.02) for model in models)
    models[1].load_state_dict(models[0].state_dict())
    data = classification(SAMPLES)
    SupervisedRunner(device="cpu").train(
        model=models[0],
        criterion=nn.CrossEntropyLoss(),
        optimizer=first,
        num_epochs=EPOCHS,
        distributed=strategy,
        loaders={"train": DataLoader(data, BATCH, shuffle=True)},
        clip_norm=0.5,
    )
    unused = []

    def note() -> None:
        unused.append(models[1].few[0].weight.grad is None)  # type: ignore[index]

    batches = global_batches(SAMPLES, size, 42)
    train_by_hand(
        models[1],
        nn.CrossEntropyLoss(),
        second,
        data.tensors,
        batches,
        EPOCHS * -(-SAMPLES // size),
        0.5,
        note,
    )
    assert 0 < sum(unused) < len(unused)
    own, theirs = (
        {float(state["step"]) for state in one.state_dict()["state"].values()}
        for one in (first, second)
    )
    assert own == theirs == {len(unused), len(unused) - sum(unused)}
    return relative_difference(models[0].state_dict(), models[1].state_dict())


class SaveAtFive(Callback):
    def on_step_end(self, training: Any) -> None:
        if training.step == 5:
            training.save_checkpoint()


class Change(Callback):
    def on_step_end(self, training: Any) -> None:
        with torch.no_grad():
            next(training.model.parameters()).mul_(0.5)


class Poison(nn.Module):
    """A loss that is NaN on rank 1, in its second call."""

    calls = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = nn.functional.cross_entropy(output, target)
        return loss * float("nan") if self.calls == 2 and os.environ["RANK"] == "1" else loss


def message(strategy: Any, **options: Any) -> str:
    try:
        train(strategy, **options)
    except allhands.AllhandsError as error:
        return str(error)
    return "no error"


def in_world(folder: str) -> dict[str, Any]:
    """All checks of one world: differences from the loop by hand, what resuming changes, and the
    errors."""
    world = allhands.init(device="cpu")
    size = BATCH * world.world_size
    found: dict[str, Any] = {}
    for name, clip_norm, accumulate, update in (
        ("sgd", None, 1, "store"),
        ("adam", 0.3, 1, "store"),
        ("adamw", None, 2, "store"),
        ("adamw", 0.3, 1, "worker"),
        ("adafactor", None, 1, "worker"),
    ):
        model, _, _ = train(
            KVStore(update=update),
            name,
            BATCH // accumulate,
            clip_norm=clip_norm,
            accumulate=accumulate,
        )
        found[f"{name} {update}"] = relative_difference(
            model.state_dict(), by_hand(size, name, clip_norm)
        )

    found["unused"] = [
        routed(KVStore(update=update, find_unused_parameters=True), size)
        for update in ("store", "worker")
    ]

    def resumed(first: Any, second: Any, where: str) -> tuple[Any, Any]:
        train(first, "sgd", logdir=f"{folder}/{where}", callbacks=[StopAt(5)])
        model, optimizer, _ = train(
            second, "sgd", logdir=f"{folder}/{where}", callbacks=[Callback()], resume="auto"
        )
        return model.state_dict(), optimizer

    through, own, _ = train(KVStore(), "sgd")
    found["weights"] = through.state_dict()
    again, optimizer = resumed(KVStore(), KVStore(), "again")
    found["resumed to the bit"] = all(
        torch.equal(value, again[name]) for name, value in through.state_dict().items()
    )
    states = zip(
        own.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    )
    found["momentum to the bit"] = all(
        torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in states
    )
    found["saved, then ddp"] = relative_difference(
        resumed(KVStore(), DDP(), "to_ddp")[0], through.state_dict()
    )
    found["ddp, then kvstore"] = relative_difference(
        resumed(DDP(), KVStore(), "from_ddp")[0], through.state_dict()
    )
    for kind, options in LOSSY.items():
        through, own, _ = train(
            KVStore(**options), "sgd", logdir=f"{folder}/{kind}_through", callbacks=[SaveAtFive()]
        )
        found[f"{kind} weights"] = through.state_dict()
        again, optimizer = resumed(KVStore(**options), KVStore(**options), kind)
        found[f"{kind} resumed"] = all(
            torch.equal(value, again[name]) for name, value in through.state_dict().items()
        )
        states = zip(
            own.state_dict()["state"].values(),
            optimizer.state_dict()["state"].values(),
            strict=True,
        )
        found[f"{kind} momentum"] = all(
            torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in states
        )
    found["changed"] = message(KVStore(), callbacks=[Change()])
    found["adafactor store"] = message(KVStore(), name="adafactor")
    found["servers"] = message(KVStore(servers=7))
    model = classifier()
    try:
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=Poison(),
            optimizer=make_optimizer("adam", model),
            distributed=KVStore(),
            loaders={"train": DataLoader(classification(SAMPLES), BATCH)},
        )
    except allhands.AllhandsError as error:
        found["poison"] = str(error)
    found["weights after poison"] = all(bool(p.isfinite().all()) for p in model.parameters())
    allhands.finalize()
    return found


@pytest.mark.parametrize(
    ("workers", "all_servers"), [(2, (0, 2)), pytest.param(3, (0,), marks=pytest.mark.rare)]
)
def test_the_same_as_by_hand(workers: int, all_servers: tuple[int, ...], tmp_path: Path) -> None:
    seen = []
    for servers in all_servers:
        seen += spawn(in_world, (str(tmp_path / str(servers)),), workers=workers, servers=servers)
    for number, found in enumerate(seen):
        servers = all_servers[number // workers]
        for name in ("sgd store", "adam store", "adamw store", "adamw worker", "adafactor worker"):
            assert found[name] < 2e-5, (name, found[name])
        assert all(
            torch.equal(value, seen[0]["weights"][name]) for name, value in found["weights"].items()
        )
        assert max(found["unused"]) < 2e-5
        assert found["resumed to the bit"]
        assert found["momentum to the bit"]
        for kind in LOSSY:
            for name, value in found[f"{kind} weights"].items():
                assert torch.equal(value, seen[0][f"{kind} weights"][name]), (
                    kind,
                    name,
                )  # with servers or without
            assert 1e-4 < relative_difference(found[f"{kind} weights"], found["weights"]) < 1.0
            assert found[f"{kind} resumed"], kind
            assert found[f"{kind} momentum"], kind
        assert found["saved, then ddp"] < 2e-5
        assert found["ddp, then kvstore"] < 2e-5
        assert "the weights of '0.weight' were changed between two steps" in found["changed"]
        assert "KVStore(update='worker')" in found["adafactor store"]
        assert f"KVStore(servers=7), but this job was started with {servers}" in found["servers"]
        assert "rank 1" in found["poison"]
        assert found["weights after poison"]


def test_workers_that_do_not_wait(tmp_path: Path) -> None:
    """With one worker there is nobody to be ahead of: the same as by hand. With two, the loss falls
    and staleness is told."""
    model, _, history = train(KVStore("async", servers=2), "adam", workers=1)
    assert relative_difference(model.state_dict(), by_hand(BATCH, "adam", None)) < 2e-5
    assert history["train"]["staleness"] == [0.0] * EPOCHS
    narrow = {"name": "topk", "keep": 0.5, "pull": "none"}
    for strategy in (
        KVStore("ssp", servers=1, staleness=1, compress=narrow),
        KVStore("async", servers=1, damping=True),
    ):
        folder = tmp_path / strategy.mode
        model, optimizer, history = train(
            strategy, "adam", epochs=4, workers=2, logdir=folder, save_every=3, clip_norm=1.0
        )
        assert history["train"]["loss"][-1] < 0.8 * history["train"]["loss"][0]
        assert all(
            0 <= mean <= most
            for mean, most in zip(
                *(history["train"][f"staleness{end}"] for end in ("", "_max")), strict=True
            )
        )
        # Each epoch has 7 steps of two workers, of which one has a sample in the last: 13 steps of
        # the optimizer.
        steps = {float(state["step"]) for state in optimizer.state_dict()["state"].values()}
        assert steps == {4 * 13.0}
        assert (folder / "metrics.csv").read_text().count("staleness_max") >= 1
    _, optimizer, history = train(
        KVStore("async", servers=1), "adam", epochs=5, workers=2, logdir=folder, resume="auto"
    )
    assert history["epoch"] == [1, 2, 3, 4, 5]
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {
        5 * 13.0
    }


def with_spare(strategy: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4))
    model.spare = nn.Parameter(torch.ones(2))  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        distributed=strategy,
        workers=2,
        loaders={"train": DataLoader(classification(SAMPLES), BATCH)},
    )
    return model.state_dict()


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_a_parameter_without_a_gradient_is_left_alone_or_named() -> None:
    assert with_spare("kvstore")["spare"].tolist() == [1.0, 1.0]
    with pytest.raises((UserError, WorkerError), match="'spare' took no part in the loss"):
        with_spare(KVStore("async", servers=1))

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
from tests.runner.problems import classification, classifier

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]

SAMPLES, BATCH, EPOCHS = (
    49,
    4,
    2,
)  # with 2 and 3 workers, the last step of an epoch has one sample, so that a rank is idle
RARE = 1.5  # two of the samples have more in their first number

LOSSY: dict[str, dict[str, Any]] = {
    "both ways": {"compress": {"name": "topk", "keep": 0.3}},
    "one way": {"compress": {"name": "1bit", "pull": "none"}},
    "in the workers": {
        "compress": {"name": "topk", "keep": 0.3, "pull": "none"},
        "update": "worker",
    },
}


def make_optimizer(name: str, model: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.02)
    if name == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=0.02)
    first, last = model[0].parameters(), model[3].parameters()
    return torch.optim.AdamW(
        [{"params": last, "lr": 0.03}, {"params": first, "weight_decay": 0.1}], lr=0.01
    )


def make_scheduler(name: str, optimizer: Any) -> Any:
    # It changes the learning rate and momentum in every step.
    return (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=200)
        if name == "sgd"
        else None
    )


def train(
    strategy: Any, name: str = "adam", batch: int = BATCH, epochs: int = EPOCHS, **options: Any
) -> Any:
    model = classifier()
    optimizer = make_optimizer(name, model)
    data = classification(SAMPLES)
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        num_epochs=epochs,
        distributed=strategy,
        loaders={"train": DataLoader(data, batch, shuffle=True)},
        scheduler=make_scheduler(name, optimizer),
        **options,
    )
    return model, optimizer, history


def by_hand(size: int, name: str, clip_norm: float | None) -> dict[str, torch.Tensor]:
    model = classifier()
    optimizer = make_optimizer(name, model)
    scheduler = make_scheduler(name, optimizer)
    steps = EPOCHS * -(-SAMPLES // size)
    train_by_hand(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        classification(SAMPLES).tensors,
        global_batches(SAMPLES, size, 42),
        steps,
        clip_norm,
        scheduler.step if scheduler else lambda: None,
    )
    return model.state_dict()


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


class Stop(Callback):
    """Ends the training after some steps."""

    def on_step_end(self, training: Any) -> None:
        if training.step == 5:
            training.stop("five steps", now=True)


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
        train(first, "sgd", logdir=f"{folder}/{where}", callbacks=[Stop()])
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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "asynch"}, "must be one of 'sync', 'async', 'ssp'"),
        ({"mode": "async", "servers": 0}, "servers=1"),
        ({"mode": "ssp", "servers": 1}, "staleness=None.*whole number of steps"),
        ({"staleness": 2}, "only mode='ssp'"),
        ({"servers": -1}, "whole number"),
        ({"update": "server"}, "one of 'store', 'worker'"),
        ({"mode": "async", "servers": 1, "update": "worker"}, "leave update out"),
        ({"mode": "async", "servers": 1, "find_unused_parameters": True}, "set mode to 'sync'"),
        ({"compress": True}, "write the name of a codec"),
        ({"compress": "powersgd"}, "which only DDP has; write 'int8'"),
        ({"compress": "fp16", "compression": {"type": "fp16"}}, "leave compression out"),
        ({"compress": {"name": "3bit"}}, "there is no codec '3bit'"),
        ({"compress": {"name": "topk", "keep": 2.0}}, "keep=2.0 of .topk"),
        (
            {"mode": "async", "compress": {"name": "fp16"}},
            "other weights; write compress={'name': 'fp16', 'pull': 'none'}",
        ),
        (
            {"update": "worker", "compress": {"name": "1bit"}},
            "write compress={'name': '1bit', 'pull': 'none'}",
        ),
        (
            {"damping": True},
            r"KVStore\(mode='sync', damping=True\): synchronous steps are never stale; leave "
            r"damping out",
        ),
        (
            {"mode": "ssp", "staleness": 0, "damping": True},
            "staleness=0, damping=True.*leave damping out",
        ),
        ({"mode": "async", "damping": 0.5}, "must be True or False"),
        ({"snapshot_every": 5}, "snapshot_every=… and snapshot_dir=… belong together"),
        (
            {"snapshot_every": 5, "snapshot_dir": "s", "servers": 0},
            "has no servers.*launch -s 1 --server-restarts 3",
        ),
        (
            {"mirror": True, "servers": 0},
            "has no servers.*mirror out.*launch -s 2 --server-restarts 3",
        ),
        ({"mirror": True, "mode": "async"}, "synchronous stores only"),
        (
            {"on_worker_loss": "continue"},
            "set on_worker_loss to 'stop', or train with allhands.kvstore.Trainer",
        ),
        ({"on_worker_loss": "restart"}, "one of 'stop', 'continue'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        KVStore(**settings)


def test_no_servers_for_workers_that_do_not_wait() -> None:
    with pytest.raises(
        UserError, match=r"needs parameter servers; write KVStore\(mode='async', servers=1"
    ):
        train(KVStore("async"), workers=2)
    assert KVStore("async").exact is False
    options = KVStore("ssp", staleness=2, damping=True, snapshot_every=5, snapshot_dir="s").options
    assert options == {
        "on_worker_loss": "stop",
        "staleness": 2,
        "damping": True,
        "snapshot_every": 5,
        "snapshot_dir": "s",
    }
    assert KVStore(compress={"name": "2bit"}).exact is False
    assert KVStore(compress={"name": "none"}).exact
    with pytest.raises(
        UserError, match="starts its own servers once.*launch -s 1 --server-restarts 3"
    ):
        train(KVStore(servers=1, snapshot_every=5, snapshot_dir="s"), workers=2)
    with pytest.raises(UserError, match="has no servers, so that none would come back"):
        KVStore(snapshot_every=5, snapshot_dir="s").check(None)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLHANDS_NUM_SERVERS", "1")
        patch.setenv("ALLHANDS_ON_WORKER_FAILURE", "continue")
        with pytest.raises(
            UserError,
            match="started with --on-worker-failure continue.*write --on-worker-failure stop",
        ):
            KVStore().check(None)  # type: ignore[arg-type]
    assert KVStore("ssp", staleness=0).exact


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


def test_the_old_name_of_compress_warns() -> None:
    with pytest.warns(FutureWarning) as told:
        assert (
            KVStore(compression={"type": "topk", "ratio": 0.1}).compress
            == KVStore(compress={"name": "topk", "keep": 0.1}).compress
        )
    said = " ".join(str(one.message) for one in told)
    assert "write KVStore(compress=…)" in said
    assert "write 'keep'" in said

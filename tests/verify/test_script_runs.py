"""`allhands verify script.py`: loops of the user's own, whole and with a fault in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allhands.errors import UserError, WorkerError
from allhands.verify.script_runs import verify_script

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]

MAKE = """
import sys, time
import torch, torch.nn.functional as F, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import allhands

torch.manual_seed(0)
data = TensorDataset(torch.randn(22, 6), torch.arange(22) % 3)
train = DataLoader(data, batch_size=4, shuffle=True)
net = lambda *sizes: nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:]))
"""
ONE = """
model = {model}
loop = allhands.Loop(
    model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loaders={{"train": train}}
)
def loss_of(batch):
    x, y = batch
    {body}
for epoch in loop.epochs(3):
    for batch in epoch.train:
        {step}
"""
PLAIN = "return F.cross_entropy(loop.model(x), y)"


def one(
    body: str = PLAIN, model: str = "net(6, 8, 3)", step: str = "loop.step(loss_of, batch)"
) -> str:
    return MAKE + ONE.format(body=body, model=model, step=step)


def verified(folder: Path, code: str, **options: Any) -> Any:
    script = folder / "train.py"
    script.write_text(code)
    return verify_script(str(script), **{"workers": (2,), "steps": 4, **options})


TWO_OPTIMIZERS = """
g, d = net(2, 8, 6), net(6, 8, 1)
loop = allhands.Loop(
    models={"g": g, "d": d},
    optimizers={"g": torch.optim.Adam(g.parameters()), "d": torch.optim.Adam(d.parameters())},
    loaders={"train": train}, accumulate=2, clip_norm=1.0, logdir="logs", save_every=1,
)
def d_loss(batch):
    fake = loop.models["g"](loop.randn(len(batch[0]), 2)).detach()
    d = loop.models["d"]
    return F.softplus(-d(batch[0])).mean() + F.softplus(d(fake)).mean()
def g_loss(batch):
    made = loop.models["g"](loop.randn(len(batch[0]), 2))
    loss = WEIGHT * F.softplus(-loop.models["d"](made)).mean()
    return {"loss": loss, "far": (made - batch[0]).abs().mean()}
def train_both():
    for step in loop.steps(30):
        loop.step(d_loss, step.batch, optimizer="d")
        loop.step(g_loss, step.batch, optimizer="g")
    print("not reached")
    sys.exit(3)
if __name__ == "__main__":
    allhands.spawn(train_both, workers=5)
"""


def test_two_optimizers_are_the_same_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    report = verified(tmp_path, MAKE + TWO_OPTIMIZERS.replace("WEIGHT", "1.0"), workers=(3,))
    assert report.ok
    assert [(row.strategy, row.workers, row.verdict) for row in report.rows] == [("ddp", 3, "same")]
    assert report.about.startswith("8 optimizer steps distributed")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    out, err = capfd.readouterr()
    assert out.strip() == report.table().strip()
    assert "not reached" not in out + err


RUNNER = """
g, d = net(2, 8, 6), net(6, 8, 1)
class GAN(allhands.Runner):
    def train_step(self, loop, batch):
        def d_loss(batch):
            fake = g(loop.randn(len(batch[0]), 2)).detach()
            return F.softplus(-d(batch[0])).mean() + F.softplus(d(fake)).mean()
        def g_loss(batch):
            made = g(DRAW(len(batch[0]), 2))
            return {"loss": F.softplus(-d(made)).mean(), "far": (made - batch[0]).abs().mean()}
        loop.step(d_loss, batch, optimizer="d")
        loop.step(g_loss, batch, optimizer="g")
    def valid_step(self, loop, batch):
        return F.softplus(-d(batch[0]) + torch.randn(1)).mean()
if __name__ == "__main__":
    GAN(device="cpu").train(
        model={"g": g, "d": d}, loaders={"train": train, "valid": train},
        optimizer={"g": torch.optim.Adam(g.parameters()), "d": torch.optim.Adam(d.parameters())},
        distributed=True, workers=5, accumulate=2, num_epochs=9, evaluate_every=2, logdir="logs",
    )
"""


def test_a_runner_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = MAKE + RUNNER
    report = verified(tmp_path, code.replace("DRAW", "loop.randn"), workers=(3,))
    assert [(row.strategy, row.workers, row.verdict) for row in report.rows] == [("ddp", 3, "same")]
    assert report.about.startswith("8 optimizer steps distributed")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    report = verified(tmp_path, code.replace("DRAW", "torch.randn"))
    (row,) = report.rows
    assert row.verdict == "DIFFERS"
    (cause,) = row.causes
    assert "random numbers: the loop calls torch.randn (train.py:20 in g_loss)," in cause


def test_the_runners_word_for_the_strategy_and_passes_by_hand(tmp_path: Path) -> None:
    code = one(step="loop.backward(loss_of(batch)); loop.step()")
    report = verified(tmp_path, code.replace("Loop(", "Loop(distributed='ddp',"))
    assert [(row.strategy, row.verdict) for row in report.rows] == [("ddp", "same")]


def test_the_optimizer_and_step_function_that_depend_on_the_rank_are_named(tmp_path: Path) -> None:
    code = MAKE + TWO_OPTIMIZERS.replace("WEIGHT", "(2.0 if loop.main else 1.0)")
    (row,) = verified(tmp_path, code, steps=2).rows
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 1, "g: loss")
    assert row.causes[0].startswith("rank: for one and the same batch, the step function g_loss")
    assert "on rank 0" in row.causes[0]


# rare: causes that are told as the others are.
@pytest.mark.parametrize(
    ("code", "what", "said"),
    [
        (
            one("return F.cross_entropy(loop.model(x + torch.randn_like(x)), y)"),
            "loss",
            "random numbers: the loop calls torch.randn_like (train.py:",
        ),
        pytest.param(
            one("import numpy; return F.cross_entropy(loop.model(x * numpy.random.rand()), y)"),
            "loss",
            "random numbers: the loop calls numpy.random.rand (train.py:",
            marks=pytest.mark.rare,
        ),
        pytest.param(
            one(
                "w = torch.ones(()); dist.all_reduce(w) if dist.is_initialized() else None; "
                "return F.cross_entropy(loop.model(x), y) * w"
            ),
            "loss",
            "collective: the loop calls torch.distributed.all_reduce (train.py:",
            marks=pytest.mark.rare,
        ),
        pytest.param(
            one(model="nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))"),
            "loss",
            "BatchNorm: with 1 in evaluation mode the difference disappears",
            marks=pytest.mark.rare,
        ),
        (
            one(model="nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 3))"),
            "loss",
            "dropout: with 1 off the difference disappears",
        ),
    ],
    ids=["draw", "numpy", "collective", "batchnorm", "dropout"],
)
def test_causes_of_a_step_function(tmp_path: Path, code: str, what: str, said: str) -> None:
    (row,) = verified(tmp_path, code, steps=2).rows
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 1, what)
    assert row.causes[0].startswith(said)


BY_HAND = """with loop.accumulating():
            for x, y in batch.micro_batches:
                loop.backward(F.cross_entropy(loop.model(x), y), count=COUNT)"""


BEFORE_STEP = "loop.backward(F.cross_entropy(loop.model(batch[0]), batch[1])); loop.step()"


def test_a_scripts_own_passes_are_recorded(tmp_path: Path) -> None:
    assert verified(tmp_path, one(step=BEFORE_STEP)).ok
    (row,) = verified(
        tmp_path, one(step=BEFORE_STEP.replace(")); l", ") * (1 + loop.main)); l"))
    ).rows
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 1, "loss")


def test_a_mean_of_means_over_uneven_shares_is_named(tmp_path: Path) -> None:
    # 22 samples: the third step has 3 on each of two ranks, and is even; with 3 workers uneven.
    code = one(step=BY_HAND.replace("COUNT", "1"))
    (row,) = verified(tmp_path, code, workers=(4,), steps=2).rows
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 2, "loss")
    assert row.causes[0].startswith("uneven shares: step 2 is the first in which the ranks have")
    assert verified(tmp_path, one(step=BY_HAND.replace("COUNT", "len(x)"))).ok


OWN_BATCHES = """
model = net(6, 8, 3)
loop = allhands.Loop(model=model, optimizer=torch.optim.Adam(model.parameters()))
for step in loop.steps(5):
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(step.number))
    first, last = loop.share(7)
    x = x[SHARE]
    for again in range(2):
        loop.step(lambda x: loop.model(x).square().mean(), x, again=True)
"""


def test_batches_of_the_ranks_own(tmp_path: Path) -> None:
    assert verified(tmp_path, MAKE + OWN_BATCHES.replace("SHARE", "first:last")).ok
    (row,) = verified(tmp_path, MAKE + OWN_BATCHES.replace("SHARE", ":")).rows
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 1, "number of samples")
    assert row.causes[0].startswith("batches of your own: the rows of all ranks together")
    assert row.causes[1].startswith(
        "samples: step 1 trains 2 workers on 14 samples (by rank: 7, 7)"
    )


def test_another_strategy_than_the_scripts_is_compared(tmp_path: Path) -> None:
    report = verified(tmp_path, one(), strategies=["fsdp", "local_sgd"], steps=2)
    # Averaged after each step of plain SGD, local_sgd is exact; its default is to average less.
    assert [(row.strategy.split()[0], row.verdict) for row in report.rows] == [
        ("fsdp", "same"),
        ("local_sgd", "lossy as declared"),
    ]


@pytest.mark.parametrize(
    ("code", "options", "error", "said"),
    [
        ("print(1)", {}, UserError, "train.py makes no allhands.Loop and trains with no"),
        (
            one().partition("for epoch")[0],
            {},
            UserError,
            "makes an allhands.Loop and takes no step",
        ),
        (
            MAKE + "allhands.SupervisedRunner().train(model=net(6, 8, 3))",
            {},
            UserError,
            r"trains with SupervisedRunner.*call allhands.verify\(model=…, …\)",
        ),
        (one("pass"), {}, UserError, r"loss_of returned nothing; end it with `return loss`"),
        (MAKE + "raise ValueError('no data')", {}, WorkerError, "ValueError: no data"),
        (MAKE + "sys.exit('usage: …')", {}, UserError, r"ended with sys.exit\('usage: …'\)"),
        (MAKE + "time.sleep(99)", {"timeout": 0.5}, WorkerError, "no step within 0.5 s: the scrip"),
        (one(), {"strategies": ["single"]}, UserError, "strategy 'single' is one process"),
        (one(), {"timeout": 0}, UserError, "timeout=0; it must be a positive number"),
        (one(), {"steps": 0}, UserError, "steps=0; it must be a whole number"),
    ],
    ids=[
        "no loop",
        "no step",
        "supervised",
        "no loss",
        "error",
        "exit",
        "hang",
        "single",
        "timeout",
        "steps",
    ],
)
def test_what_cannot_be_compared_is_named(
    tmp_path: Path, code: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        verified(tmp_path, code, **options)

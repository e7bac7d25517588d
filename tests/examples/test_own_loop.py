"""The examples of own loops: each trains what a loop by hand trains in one process, on one, two and
three workers."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import math
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from allhands.data import derive_seed
from allhands.data.catalogue import load
from allhands.data.order import global_order
from tests.examples.running import EXAMPLES, program, run_in
from tests.worlds import in_world

# The last global batch of an epoch has 5 samples, which neither two nor three divide.
SAMPLES, GLOBAL, EPOCHS = 53, 12, 4
STEPS = EPOCHS * -(-SAMPLES // GLOBAL)


def example(name: str) -> ModuleType:
    """The example, as a module of its own."""
    path = EXAMPLES / "own_loop" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"own_loop_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digits(split: str = "train") -> TensorDataset:
    return load("digits", split, limit=SAMPLES)


def in_order(data: TensorDataset) -> Iterator[tuple[torch.Tensor, ...]]:
    """The global batches of the steps."""
    for epoch in range(EPOCHS):
        for rows in global_order(SAMPLES, 42, epoch).split(GLOBAL):
            yield tuple(tensor[rows] for tensor in data.tensors)


class Noise:
    """What `Loop.randn` and `Loop.rand` draw for a whole batch, in the step functions of one
    iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration, self.steps, self.draws = iteration, -1, 0

    def begin(self) -> None:
        """A step begins."""
        self.steps, self.draws = self.steps + 1, 0

    def __call__(self, *shape: int, draw: Any = torch.randn) -> torch.Tensor:
        self.draws += 1
        seed = derive_seed(42, "draw", self.iteration, self.steps, self.draws)
        drawn: torch.Tensor = draw(*shape, generator=torch.Generator().manual_seed(seed))
        return drawn


def numbers_in(result: Any) -> list[Any]:
    """The weights, and whatever else an example's `train` returned."""
    found: list[Any] = []
    for one in result if isinstance(result, tuple) else (result,):
        if isinstance(one, nn.Module):
            found += [value.detach().clone() for value in one.state_dict().values()]
        else:
            found.append(torch.tensor(one["valid"]["loss"]))  # a history
    return found


def train(
    name: str,
    batch_size: int | None,
    dtype: torch.dtype,
    args: tuple[Any, ...],
    given: dict[str, Any],
) -> list[torch.Tensor]:
    torch.set_default_dtype(dtype)
    sizes = {} if batch_size is None else {"batch_size": batch_size}
    return numbers_in(example(name).train(*args, **sizes, **given))


def assert_trains(
    name: str, expected: Any, *args: Any, size: int | None = GLOBAL, **given: Any
) -> None:
    """Each number of workers trains what was expected."""
    for workers in (1, 2, 3):
        own_size = None if size is None else size // workers
        what = name, own_size, torch.get_default_dtype(), args, given
        found = [train(*what)] if workers == 1 else in_world(workers, train, *what)
        for rank, own in enumerate(found):
            for one, other in zip(own, numbers_in(expected), strict=True):
                torch.testing.assert_close(
                    one,
                    other,
                    rtol=0,
                    atol=1e-5,
                    msg=lambda text, at=(rank, workers): f"rank {at[0]} of {at[1]}: {text}",
                )


# ---------------------------------------------------------------------- the same by hand


@pytest.mark.serial
def test_dcgan() -> None:
    data = digits()
    torch.manual_seed(0)
    g, d = example("dcgan").build()
    of_g, of_d = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999)) for m in (g, d))
    for number, (x, _) in enumerate(in_order(data)):
        draw = Noise(number)
        draw.begin()
        of_d.zero_grad()
        fake = g(draw(len(x), 32)).detach()
        (F.softplus(-d(2 * x - 1)).mean() + F.softplus(d(fake)).mean()).backward()
        of_d.step()
        draw.begin()
        of_g.zero_grad()
        F.softplus(-d(g(draw(len(x), 32)))).mean().backward()
        of_g.step()
    assert_trains("dcgan", (g, d), data, epochs=EPOCHS)


@pytest.mark.serial
def test_simclr() -> None:
    data, module = digits(), example("simclr")
    torch.manual_seed(0)
    model = module.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for number, (x, _) in enumerate(in_order(data)):
        draw = Noise(number)
        draw.begin()
        one, other = (
            F.normalize(model(module.view(x, draw(len(x), 4, draw=torch.rand))), dim=1)
            for _ in range(2)
        )
        rows = torch.cat([one, other])
        # Each row against all others, one after another.
        losses = []
        for row in range(2 * len(x)):
            others = [n for n in range(2 * len(x)) if n != row]
            scores = rows[others] @ rows[row] / 0.2
            partner = others.index((row + len(x)) % (2 * len(x)))
            losses.append(scores.logsumexp(0) - scores[partner])
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    assert_trains("simclr", model, data, digits("valid"), epochs=EPOCHS)


@pytest.mark.serial
def test_distillation() -> None:
    data = digits()
    torch.manual_seed(3)
    teacher = example("distillation").build(16)
    before = copy.deepcopy(teacher.state_dict())
    torch.manual_seed(1)
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    for x, y in in_order(data):
        target = (teacher.eval()(x).detach() / 3).softmax(1)  # without dropout
        soft = (target * (target.log() - (student(x) / 3).log_softmax(1))).sum(1).mean()
        optimizer.zero_grad()
        (0.7 * 9 * soft + 0.3 * F.cross_entropy(student(x), y)).backward()
        optimizer.step()
    given = data, digits("valid"), teacher
    assert_trains("distillation", student, *given, epochs=EPOCHS)
    assert all(map(torch.equal, teacher.state_dict().values(), before.values()))


@pytest.mark.serial
def test_wgan_gp() -> None:
    data = digits()
    torch.manual_seed(0)
    generator, critic = example("wgan_gp").build()
    of_generator, of_critic = (
        torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.0, 0.9)) for m in (generator, critic)
    )
    for number, (x, _) in enumerate(in_order(data)):
        draw = Noise(number)
        draw.begin()
        real, fake = x.flatten(1), generator(draw(len(x), 32)).detach()
        mix = draw(len(x), 1, draw=torch.rand)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
        penalty = (slope.square().sum(1).sqrt() - 1).square().mean()
        of_critic.zero_grad()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        of_critic.step()
        if (number + 1) % 5 == 0:
            draw.begin()
            of_generator.zero_grad()
            (-critic(generator(draw(len(x), 32))).mean()).backward()
            of_generator.step()
    assert_trains("wgan_gp", (generator, critic), data, steps=STEPS)


@pytest.fixture
def float64() -> Iterator[None]:
    """Adam divides gradients that are rounding alone by themselves: in float32 it moves the keys'
    biases, whose gradients are zero, by more than what is compared."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.serial
def test_gpt(float64: None) -> None:
    module = example("gpt")
    text = (EXAMPLES / "own_loop" / "gpt.py").read_text()
    data, _, vocabulary = module.blocks(text, 16)
    data, valid = (TensorDataset(*(t[:SAMPLES] for t in data.tensors)) for _ in range(2))
    torch.manual_seed(0)
    model = module.GPT(vocabulary, 16, layers=2, heads=2, width=64)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, (x, y) in enumerate(in_order(data)):
        for group in optimizer.param_groups:
            cosine = math.cos(math.pi * (step - 5) / (STEPS - 5))
            group["lr"] = 3e-3 * ((step + 1) / 5 if step < 5 else 0.55 + 0.45 * cosine)
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    given = {"steps": STEPS, "warmup": 5, "every": 8}
    assert_trains("gpt", model, data, valid, vocabulary, **given)


@pytest.mark.serial
def test_ema() -> None:
    data, valid = digits(), digits("valid")
    torch.manual_seed(0)
    model = example("ema").build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    losses = []
    for number, (x, y) in enumerate(in_order(data)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, value in zip(average.module.parameters(), model.parameters(), strict=True):
                mean.copy_(0.95 * mean + 0.05 * value if number else value)
        average.n_averaged += 1
        if (number + 1) % (STEPS // EPOCHS) == 0:
            losses.append(F.cross_entropy(average(valid.tensors[0]), valid.tensors[1]).item())
    expected = model, average, {"valid": {"loss": losses}}
    assert_trains("ema", expected, data, valid, epochs=EPOCHS)


@pytest.mark.serial
def test_sam() -> None:
    data = digits()
    torch.manual_seed(0)
    model = example("sam").build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in in_order(data):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        here = [p.detach().clone() for p in model.parameters()]
        slopes = [p.grad.clone() for p in model.parameters()]
        length = torch.cat([slope.flatten() for slope in slopes]).norm()
        with torch.no_grad():
            for p, slope in zip(model.parameters(), slopes, strict=True):
                p.copy_(p + 0.05 * slope / length)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, value in zip(model.parameters(), here, strict=True):
                p.copy_(value)
        optimizer.step()
    assert_trains("sam", model, data, digits("valid"), epochs=EPOCHS)


@pytest.mark.serial
def test_ppo() -> None:
    module = example("ppo")
    carts, length, part, passes = 7, 24, 12, 2  # neither two nor three workers divide the carts
    torch.manual_seed(0)
    model = module.ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for iteration in range(1, 6):
        rollout = module.rollout(model, *module.draw(iteration, carts, length))
        states, pushes, before, advantages, returns, _ = rollout
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
        generator = torch.Generator().manual_seed(iteration)
        orders = [torch.randperm(length, generator=generator) for _ in range(passes)]
        for times in itertools.chain.from_iterable(order.split(part) for order in orders):
            logits, values = model(states[times])
            chosen = torch.where(pushes[times] == 1, logits.sigmoid(), (-logits).sigmoid())
            ratio = (chosen.log() - before[times]).exp()
            one, other = ratio * advantages[times], ratio.clamp(0.8, 1.2) * advantages[times]
            loss = (values - returns[times]).square().mean() / 2 - torch.min(one, other).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    given = {"carts": carts, "length": length, "iterations": 5, "passes": passes, "part": part}
    assert_trains("ppo", model, size=None, **given)


# ---------------------------------------------------------------------- as scripts

SMALL = {
    "dcgan": ["--epochs", "1", "--limit", "48"],
    "simclr": ["--epochs", "1", "--limit", "96"],
    "distillation": ["--epochs", "1", "--limit", "96"],
    "wgan_gp": ["--steps", "100", "--limit", "48"],
    "gpt": ["--steps", "4", "--every", "2", "--limit", "6000", "--logdir", "logs"],
    "ema": ["--epochs", "1", "--limit", "96"],
    "sam": ["--epochs", "1", "--limit", "96"],
    "ppo": ["--iterations", "10", "--carts", "2", "--length", "8"],
}


@pytest.mark.parametrize("name", SMALL)
def test_it_is_a_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL[name]])
    runpy.run_path(str(EXAMPLES / "own_loop" / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "single, 1 worker" in said
    assert "peak memory" in said  # it has come to the end
    assert (tmp_path / "logs" / "metrics.csv").exists() == (name == "gpt")


def test_all_of_them_are_tested() -> None:
    assert {path.stem for path in (EXAMPLES / "own_loop").glob("*.py")} == SMALL.keys()


@pytest.mark.serial
def test_they_run_under_a_launcher(tmp_path: Path) -> None:
    script = str(EXAMPLES / "own_loop" / "simclr.py")
    text = run_in(tmp_path, program("allhands"), "launch", "-n", "2", script, *SMALL["simclr"])
    assert "ddp, 2 workers" in text
    assert text.count("nearest image of the same class") == 1

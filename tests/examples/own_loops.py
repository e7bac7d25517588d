"""The trainings of `examples/own_loop` by hand, in one process, for what the examples train to be
compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from allhands.data import derive_seed
from allhands.data.catalogue import load
from allhands.data.order import global_order
from tests.examples.running import EXAMPLES, example_module

# The last global batch of an epoch has 5 samples, which neither two nor three divide.
SAMPLES, GLOBAL, EPOCHS = 53, 12, 4
STEPS = EPOCHS * -(-SAMPLES // GLOBAL)


def example(name: str) -> ModuleType:
    """The example, as a module of its own."""
    return example_module(f"own_loop/{name}")


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


@dataclass
class Case:
    """What an example is called with, and what it must give.

    Args:
        name: of the example.
        expected: what its ``train`` returns in one process.
        args, given: for ``train``.
        batched: whether ``train`` takes a batch_size.
    """

    name: str
    expected: list[torch.Tensor]
    args: tuple[Any, ...]
    given: dict[str, Any]
    batched: bool = True
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def train(self, shares: int = 1, **options: Any) -> list[torch.Tensor]:
        """What the example gives, the batches divided into `shares`; to be called on each rank."""
        sizes = {"batch_size": GLOBAL // shares} if self.batched else {}
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return numbers_in(
                example(self.name).train(*self.args, **sizes, **self.given, **options)
            )
        finally:
            torch.set_default_dtype(before)

    def difference(self, found: list[torch.Tensor]) -> float:
        """The largest difference from what is expected."""
        differences = [
            (one - other).abs().max().item()
            for one, other in zip(found, self.expected, strict=True)
        ]
        return max(differences)


@contextmanager
def float64() -> Iterator[None]:
    """Adam divides gradients that are rounding alone by themselves: in float32 it moves biases
    whose gradients are zero, as those of keys, by more than what is compared."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@float64()
def dcgan() -> Case:
    images, labels = digits().tensors
    data = TensorDataset(images.double(), labels)
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
    return Case("dcgan", numbers_in((g, d)), (data,), {"epochs": EPOCHS})


def simclr() -> Case:
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
    return Case("simclr", numbers_in(model), (data, digits("valid")), {"epochs": EPOCHS})


def distillation() -> Case:
    data = digits()
    torch.manual_seed(3)
    teacher = example("distillation").build(16)
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
    return Case("distillation", numbers_in(student), given, {"epochs": EPOCHS})


def wgan_gp() -> Case:
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
    return Case("wgan_gp", numbers_in((generator, critic)), (data,), {"steps": STEPS})


@float64()
def gpt() -> Case:
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
    return Case("gpt", numbers_in(model), (data, valid, vocabulary), given)


def ema() -> Case:
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
                mean.copy_(0.95 * mean + 0.05 * value)
        if (number + 1) % (STEPS // EPOCHS) == 0:
            losses.append(F.cross_entropy(average(valid.tensors[0]), valid.tensors[1]).item())
    expected = model, {"valid": {"loss": losses}}
    return Case("ema", numbers_in(expected), (data, valid), {"epochs": EPOCHS})


def sam() -> Case:
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
    return Case("sam", numbers_in(model), (data, digits("valid")), {"epochs": EPOCHS})


def ppo() -> Case:
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
    return Case("ppo", numbers_in(model), (), given, batched=False)


CASES: dict[str, Callable[[], Case]] = {
    fn.__name__: fn for fn in (dcgan, simclr, ppo, distillation, wgan_gp, gpt, ema, sam)
}

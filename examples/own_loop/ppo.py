"""PPO: rollouts are split over the workers, and advantages normalised over all of them.

python ppo.py
allhands launch -n 2 ppo.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import allhands


class CartPole:
    """Many poles on carts, each to be balanced by pushes to the left (0) or the right (1)."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states  # [carts, 4]: place, speed, angle, turn

    def step(self, pushes: torch.Tensor, restarts: torch.Tensor) -> torch.Tensor:
        """Which poles still stand, as 0 or 1. Those that do not are put up again."""
        _, speed, angle, turn = self.states.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        force = (20 * pushes - 10 + 0.05 * turn.square() * sin) / 1.1
        swing = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - cos.square() / 11))
        moved = torch.stack([speed, force - swing * cos / 22, turn, swing], dim=1)
        states = self.states + 0.02 * moved
        stands = (states[:, 0].abs() < 2.4) & (states[:, 2].abs() < 0.21)
        self.states = torch.where(stands[:, None], states, restarts)
        return stands.float()


class ActorCritic(nn.Module):
    """The logit of a push to the right, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(states).squeeze(-1), self.critic(states).squeeze(-1)


def log_probability(logits: torch.Tensor, pushes: torch.Tensor) -> torch.Tensor:
    return -F.binary_cross_entropy_with_logits(logits, pushes, reduction="none")


def draw(iteration: int, carts: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers for all carts of all workers: each draws all, and takes its share. So a cart
    does the same at any number of workers."""
    generator = torch.Generator().manual_seed(iteration)
    starts = 0.1 * torch.rand(length + 1, carts, 4, generator=generator) - 0.05
    return starts, torch.rand(length, carts, generator=generator)


@torch.no_grad()
def rollout(model, starts, draws):
    """States, pushes, their log probabilities, advantages and returns, each ``[length, carts]``,
    and which poles stood."""
    env = CartPole(starts[0])
    states, pushes, stood, probabilities, values = [], [], [], [], []
    for restarts, drawn in zip(starts[1:], draws, strict=True):
        logits, value = model(env.states)
        push = (drawn < logits.sigmoid()).float()
        states.append(env.states)
        pushes.append(push)
        probabilities.append(log_probability(logits, push))
        values.append(value)
        stood.append(env.step(push, restarts))
    values.append(model(env.states)[1])
    advantage, advantages = torch.zeros_like(values[0]), []
    for t in reversed(range(len(states))):
        error = stood[t] * (1 + 0.99 * values[t + 1]) - values[t]
        advantage = error + 0.99 * 0.95 * stood[t] * advantage
        advantages.insert(0, advantage)
    columns = states, pushes, probabilities, advantages, stood
    states, pushes, probabilities, advantages, stood = map(torch.stack, columns)
    return states, pushes, probabilities, advantages, advantages + torch.stack(values[:-1]), stood


def train(carts=32, length=128, iterations=40, passes=4, part=32, **options):
    """Train on `carts` carts, which the workers share, with steps on `part` times of all carts."""
    torch.manual_seed(0)
    model = ActorCritic()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        clip_norm=0.5,
        **options,
    )
    mine = slice(*loop.share(carts))

    def loss_of(batch):
        states, pushes, before, advantages, returns = batch
        logits, values = loop.model(states)
        ratio = (log_probability(logits, pushes) - before).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return F.mse_loss(values, returns) * 0.5 - gain

    for step in loop.steps(iterations):
        starts, draws = (drawn[:, mine] for drawn in draw(step.number, carts, length))
        *columns, stood = rollout(loop.model, starts.to(loop.device), draws.to(loop.device))
        advantages = columns[3]
        mean = loop.mean(advantages.mean(), advantages.numel())
        variance = loop.mean((advantages - mean).square().mean(), advantages.numel())
        columns[3] = (advantages - mean) / (variance.sqrt() + 1e-8)
        generator = torch.Generator().manual_seed(step.number)  # the same times on all workers
        for _ in range(passes):
            for times in torch.randperm(length, generator=generator).split(part):
                loop.step(loss_of, [column[times].flatten(0, 1) for column in columns])
        if step.every(10):
            step.log(falls=length * (1 - loop.mean(stood.mean(), stood.numel())))
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--carts", type=int, default=32)
    parser.add_argument("--length", type=int, default=128, help="pushes in a rollout")
    parser.add_argument("--strategy")
    args = parser.parse_args()
    train(args.carts, args.length, args.iterations, strategy=args.strategy)

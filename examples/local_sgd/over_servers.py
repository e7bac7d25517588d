"""Local SGD whose workers may be lost, and come back, while the others train on.

    allhands launch -n 3 -s 1 --on-worker-failure restart --max-restarts 3
    examples/local_sgd/over_servers.py

The server holds the weights and takes the outer optimizer's steps, here DiLoCo's. A worker that is
lost leaves the mean: a round closes on those who are left. One that was started again reads the
server's weights and counts from the next round on. Kill one to see it; each says the number of its
process.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader

from allhands import kvstore as kv
from allhands import models
from allhands.data import catalogue


def endless(batches: DataLoader) -> Iterator[list[torch.Tensor]]:
    """The batches of one epoch after another."""
    while True:
        yield from batches


def main() -> None:
    """Train, and print the held-out accuracy of the shared weights after each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--every", type=int, default=32, help="H, a worker's own steps in a round")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds that a round takes longer"
    )
    options = parser.parse_args()

    store = kv.create("dist")
    print(f"worker {store.rank} of {store.num_workers}, process {os.getpid()}", flush=True)
    data, held_out = catalogue.load("digits", "train"), catalogue.load("digits", "valid")
    sampler = kv.SplitSampler(len(data), store.num_workers, store.rank)
    batches = endless(DataLoader(data, 16, sampler=sampler))

    torch.manual_seed(0)
    shared = models.mlp(in_features=64, out_features=10)
    outer = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
    # What it is given counts by this worker's samples, as the mean gradient of a batch does.
    trainer = kv.Trainer(shared, "sgd", outer, kvstore=store, reduction="mean")
    own = copy.deepcopy(shared)
    inner = torch.optim.AdamW(own.parameters(), lr=1e-3)

    done = 0
    while done < options.rounds:
        own.load_state_dict(shared.state_dict())
        seen = 0
        for _ in range(options.every):
            images, labels = next(batches)
            inner.zero_grad()
            nn.functional.cross_entropy(own(images), labels).backward()
            inner.step()
            seen += len(images)
        time.sleep(options.pause)
        for before, after in zip(shared.parameters(), own.parameters(), strict=True):
            before.grad = before.detach() - after.detach()
        trainer.step(seen)  # the weights in `shared` are the server's new ones afterwards
        done, there = trainer.last_step.number, trainer.last_step.workers
        with torch.no_grad():
            images, labels = held_out[:]
            right = (shared(images).argmax(1) == labels).float().mean()
        print(f"round {done}: {there} workers, accuracy {right:.1%}", flush=True)


if __name__ == "__main__":
    main()

"""ResNet-18 on CIFAR-10 through a distributed key-value store: the Gluon tutorial's script, with
PyTorch as the array library.

On two hosts, each with a worker (which uses all GPUs there) and a parameter server; `hosts` beside
this file names the two:

    allhands launch -n 2 -s 2 -H hosts --sync-dst-dir /home/ubuntu/cifar10_dist --launcher ssh \\
        "python /home/ubuntu/cifar10_dist/cifar10_dist.py"

On this machine, with servers, without, and alone:

    allhands launch -n 2 -s 2 cifar10_dist.py
    allhands launch -n 2 cifar10_dist.py
    python cifar10_dist.py

The variable ALLHANDS_DATA names the folder that holds `cifar-10-batches-bin` or
`cifar-10-batches-py`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from allhands import kvstore as kv
from allhands.data import catalogue
from allhands.models import resnet18
from allhands.world import detect

# A sum over the samples: the Trainer divides by the number of all samples of all workers.
loss = nn.CrossEntropyLoss(reduction="sum")


def devices_here() -> list[torch.device]:
    """All GPUs of this host, dealt out among its workers; the CPU where there is none."""
    place = detect()  # None when this process is alone
    first, step = (place.local_rank, place.local_world_size) if place else (0, 1)
    mine = range(first, torch.cuda.device_count(), step)
    return [torch.device("cuda", number) for number in mine] or [torch.device("cpu")]


def forward_backward(net: nn.Module, data: list[torch.Tensor], label: list[torch.Tensor]) -> None:
    """Run one forward and backward pass on all devices of this worker."""
    # The last batch may have fewer samples than there are devices; a slice without samples has no
    # loss.
    losses = [loss(net(X), Y) for X, Y in zip(data, label, strict=True) if len(X)]
    for each in losses:
        each.backward()


def train_batch(
    batch: list[torch.Tensor], ctx: list[torch.device], net: nn.Module, trainer: kv.Trainer
) -> None:
    """Train on one batch of this worker's, cut into a slice for each device."""
    data = kv.split_and_load(batch[0], ctx, even_split=False)
    label = kv.split_and_load(batch[1], ctx, even_split=False)
    forward_backward(net, data, label)
    trainer.step(batch[0].shape[0])


@torch.no_grad()
def evaluate_accuracy(batches: DataLoader, ctx: list[torch.device], net: nn.Module) -> float:
    """The share of the images that the net gets right."""
    right = seen = 0
    net.eval()
    for images, labels in batches:
        data, label = (kv.split_and_load(part, ctx, even_split=False) for part in (images, labels))
        right += sum(
            int((net(X).argmax(1) == Y).sum()) for X, Y in zip(data, label, strict=True) if len(X)
        )
        seen += len(labels)
    net.train()
    return right / seen


def main() -> None:
    """Train, and print the accuracy after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="samples in a step, for each device"
    )
    parser.add_argument("--samples", type=int, help="train on the first of them only")
    parser.add_argument("--test-samples", type=int, help="test on the first of them only")
    parser.add_argument(
        "--kvstore", default="dist", help="dist, dist_async or dist_ssp; the last two need servers"
    )
    options = parser.parse_args()

    store = kv.create(options.kvstore)
    print(f"Total number of workers: {store.num_workers}")
    print(f"This worker's rank: {store.rank}", flush=True)
    ctx = devices_here()
    batch_size = options.batch_size * len(ctx)

    # Each worker trains on its own part, and tests on everything.
    dataset = catalogue.load("cifar10", "train", limit=options.samples)
    sampler = kv.SplitSampler(len(dataset), store.num_workers, store.rank)
    train_data = DataLoader(dataset, batch_size, sampler=sampler)
    test_data = DataLoader(
        catalogue.load("cifar10", "test", limit=options.test_samples), batch_size
    )

    torch.manual_seed(0)
    net = kv.replicate(resnet18(num_classes=10), ctx)
    trainer = kv.Trainer(net.collect_params(), "adam", {"learning_rate": 0.001}, kvstore=store)

    for epoch in range(options.epochs):
        for batch in train_data:
            train_batch(batch, ctx, net, trainer)
        test_accuracy = evaluate_accuracy(test_data, ctx, net)
        print(f"Epoch {epoch}: Test_acc {test_accuracy:.6f}", flush=True)


if __name__ == "__main__":
    main()

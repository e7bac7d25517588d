"""A classifier of digits in a loop of allhands: accumulation, a schedule, accuracy."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import allhands


def main(epochs=10):
    torch.manual_seed(1)
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    train, valid = random_split(data, [1500, 297])
    train = DataLoader(train, batch_size=32, shuffle=True)
    valid = DataLoader(valid, batch_size=64)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, epochs)
    loop = allhands.Loop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loaders={"train": train, "valid": valid},
        accumulate=2,
        clip_norm=1.0,
        logdir="logs/accelerate",
    )
    model = loop.model

    for epoch in loop.epochs(epochs):
        for batch in epoch.train:
            with loop.accumulating():
                for x, y in batch.micro_batches:
                    loss = F.cross_entropy(model(x), y)
                    loop.backward(loss, count=len(x))
        with epoch.evaluating("valid") as valid:
            for x, y in valid.batches:
                predicted = model(x).argmax(1)
                valid.add(accuracy=(predicted == y).float().mean())


if __name__ == "__main__":
    main()

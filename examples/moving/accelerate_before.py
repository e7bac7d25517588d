"""A classifier of digits in a loop over Accelerate: accumulation, a schedule, accuracy."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def main(epochs=10):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(1)
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
    model, optimizer, train, valid, scheduler = accelerator.prepare(
        model, optimizer, train, valid, scheduler
    )

    for epoch in range(epochs):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        model.eval()
        right = []
        for x, y in valid:
            with torch.no_grad():
                predicted = model(x).argmax(1)
            predicted, y = accelerator.gather_for_metrics((predicted, y))
            right.append((predicted == y).float())
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(right).mean():.3f}")
        accelerator.save_state("logs/accelerate")


if __name__ == "__main__":
    main()

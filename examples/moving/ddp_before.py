"""A classifier of digits in a loop over DistributedDataParallel, for torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def main(epochs=10):
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    torch.manual_seed(1)
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    train, valid = random_split(data, [1500, 297])
    sampler = DistributedSampler(train)
    train = DataLoader(train, batch_size=32, sampler=sampler)
    valid = DataLoader(valid, batch_size=64, sampler=DistributedSampler(valid, shuffle=False))
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(model, device_ids=[device.index] if gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        right = torch.zeros(2, device=device)
        with torch.no_grad():
            for x, y in valid:
                x, y = x.to(device), y.to(device)
                right[0] += (model(x).argmax(1) == y).sum()
                right[1] += len(y)
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {right[0] / right[1]:.3f}")
            os.makedirs("logs/ddp", exist_ok=True)
            torch.save(model.module.state_dict(), "logs/ddp/last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

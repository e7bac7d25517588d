"""Handwritten digits with Horovod and PyTorch, as its users' scripts do it: every worker has a part
of the data."""

import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data", default=os.environ.get("ALLHANDS_DATA", "."))
parser.add_argument("--samples", type=int, default=4500)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=20)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=5)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=5)
        self.drop = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(256, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(args, split, limit):
    with np.load(os.path.join(args.data, f"mnist_{split}.npz")) as file:
        images, labels = file["x"][:limit], file["y"][:limit]
    scaled = (torch.from_numpy(images).float()[:, None] / 255 - 0.1307) / 0.3081
    return TensorDataset(scaled, torch.from_numpy(labels).long())


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    torch.set_num_threads(1)

    train = digits(args, "train", args.samples)
    train_sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train, batch_size=args.batch_size, sampler=train_sampler)
    test = digits(args, "test", 1000)
    test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test, batch_size=250, sampler=test_sampler)

    model = Net()
    scale = hvd.size() if not args.use_adasum else 1
    optimizer = optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for batch, (images, labels) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            if batch % args.log_interval == 0:
                print(
                    f"Train Epoch: {epoch} [{batch * len(images)}/{len(train_sampler)}]\tLoss: "
                    f"{loss.item():.6f}"
                )
        model.eval()
        total, right = 0.0, 0.0
        with torch.no_grad():
            for images, labels in test_loader:
                output = model(images)
                total += F.nll_loss(output, labels, reduction="sum").item()
                right += (output.argmax(1) == labels).float().sum().item()
        average = metric_average(total / len(test_sampler), "avg_loss")
        accuracy = metric_average(right / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"Test set: Average loss: {average:.4f}, Accuracy: {100 * accuracy:.2f}%")
    digest = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
    print(f"rank {hvd.rank()} of {hvd.size()} ends with weights {digest:.12f}")


if __name__ == "__main__":
    main()

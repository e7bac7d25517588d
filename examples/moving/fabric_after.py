"""A variational autoencoder of digits in a loop of allhands."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import allhands


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def loss_of(output, x):
    y, mean, log_variance = output
    kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
    return F.binary_cross_entropy_with_logits(y, x, reduction="sum") / len(x) + kl


def main(epochs=10):
    torch.manual_seed(1)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train, valid = random_split(TensorDataset(images), [1500, 297])
    train = DataLoader(train, batch_size=64, shuffle=True)
    valid = DataLoader(valid, batch_size=64)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loaders = {"train": train, "valid": valid}
    loop = allhands.Loop(
        model=model, optimizer=optimizer, loaders=loaders, clip_norm=100.0, logdir="logs/fabric"
    )
    model = loop.model

    for epoch in loop.epochs(epochs):
        for (x,) in epoch.train:
            noise = loop.randn(len(x), 8)
            loss = loss_of(model(x, noise), x)
            loop.backward(loss)
            loop.step()
        with epoch.evaluating("valid") as valid:
            for (x,) in valid.batches:
                noise = torch.zeros(len(x), 8, device=x.device)
                valid.add(loss=loss_of(model(x, noise), x))


if __name__ == "__main__":
    main()

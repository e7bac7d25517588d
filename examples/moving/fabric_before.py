"""A variational autoencoder of digits in a loop over Lightning Fabric."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


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
    fabric = L.Fabric()
    fabric.launch()
    fabric.seed_everything(1)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train, valid = random_split(TensorDataset(images), [1500, 297])
    train = fabric.setup_dataloaders(DataLoader(train, batch_size=64, shuffle=True))
    valid = fabric.setup_dataloaders(DataLoader(valid, batch_size=64))
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)

    for epoch in range(epochs):
        model.train()
        for (x,) in train:
            noise = torch.randn(len(x), 8, device=x.device)
            loss = loss_of(model(x, noise), x)
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=100.0)
            optimizer.step()
        model.eval()
        total = count = 0
        with torch.no_grad():
            for (x,) in valid:
                noise = torch.zeros(len(x), 8, device=x.device)
                total += loss_of(model(x, noise), x) * len(x)
                count += len(x)
        total = fabric.all_reduce(torch.as_tensor([total, count]), reduce_op="sum")
        fabric.print(f"epoch {epoch}: valid {total[0] / total[1]:.3f}")
        fabric.save("logs/fabric/last.ckpt", {"model": model, "optimizer": optimizer})


if __name__ == "__main__":
    main()

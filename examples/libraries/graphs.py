"""Graphs of PyTorch Geometric: a step is the mean over the graphs of the global batch, whatever
their sizes.

python graphs.py
allhands launch -n 2 graphs.py
"""

import argparse

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

import allhands


def ring(number: int) -> Data:
    """A ring of 3 to 12 nodes, with the label 1 where their numbers have a positive mean."""
    generator = torch.Generator().manual_seed(number)
    nodes = torch.arange(int(torch.randint(3, 13, (), generator=generator)))
    x = torch.randn(len(nodes), 4, generator=generator)
    edges = torch.stack([nodes, nodes.roll(1)])
    edge_index = torch.cat([edges, edges.flip(0)], dim=1)
    return Data(x=x, edge_index=edge_index, y=(x.mean() > 0).long().reshape(1))


class GraphNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(4, 32)
        self.head = torch.nn.Linear(32, 2)

    def forward(self, batch):
        hidden = self.conv(batch.x, batch.edge_index).relu()
        return self.head(global_mean_pool(hidden, batch.batch))


def train(batch_size: int = 16, samples: int = 512, epochs: int = 3, **options):
    """Train, and predict the logits of the validation graphs. `batch_size` is that of one
    worker."""
    torch.manual_seed(0)
    model = GraphNet()
    loaders = {
        "train": DataLoader([ring(number) for number in range(samples)], batch_size, shuffle=True),
        "valid": DataLoader([ring(-1 - number) for number in range(101)], batch_size),
    }
    # The model gets the whole batch; its target is batch.y.
    runner = allhands.SupervisedRunner(model, target_key="y")
    history = runner.train(
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loaders=loaders,
        metrics=["accuracy"],
        num_epochs=epochs,
        **options,
    )
    return model, history, runner.predict(loader=loaders["valid"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=512)
    _, history, logits = train(samples=parser.parse_args().samples)
    print("accuracy:", history["valid"]["accuracy"][-1], "logits:", list(logits.shape))

"""A WebDataset: samples in tar files, which all workers read or divide among them.

python web_dataset.py
allhands launch -n 2 web_dataset.py --split
"""

import argparse
import tempfile
from pathlib import Path

import torch
import webdataset as wds

import allhands


def write_shards(folder: Path, samples: int = 320, shards: int = 5) -> str:
    """Tar files of different numbers of samples; returns their names as WebDataset takes them."""
    generator = torch.Generator().manual_seed(1)
    for shard in range(shards):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in range(samples // shards + 7 * shard):
                x = torch.randn(4, generator=generator)
                label = int(x[0] * x[1] > 0)
                writer.write({"__key__": f"{shard}-{number}", "x.pth": x, "label.cls": label})
    return f"{folder}/{{0..{shards - 1}}}.tar"


def read(urls: str, split: bool) -> wds.WebDataset:
    """Pairs of a point and its label. With `split`, each worker reads shards of its own; they may
    hold different numbers of samples, and each counts once."""
    nodes = {"nodesplitter": wds.split_by_node} if split else {}
    data = wds.WebDataset(urls, shardshuffle=False, **nodes)
    return data.decode().to_tuple("x.pth", "label.cls")


def train(urls: str, batch_size: int = 16, split: bool = False, epochs: int = 3, **options):
    """Train a classifier of points. `batch_size` is that of one worker."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    history = allhands.SupervisedRunner().train(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        datasets={"batch_size": batch_size, "train": read(urls, split), "valid": read(urls, split)},
        metrics=["accuracy"],
        num_epochs=epochs,
        **options,
    )
    return model, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--split", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _, history = train(write_shards(Path(folder), given.samples), split=given.split)
    print("accuracy:", history["valid"]["accuracy"][-1])

"""Data sets of Hugging Face: one with indices, and a stream in shards.

python hf_datasets.py
python hf_datasets.py --stream
allhands launch -n 2 hf_datasets.py --stream
"""

import argparse

import torch
from datasets import Dataset

import allhands


def points(samples: int, seed: int) -> Dataset:
    """Where there is a hub or a file: load_dataset("…")."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    label = (x[:, 0] * x[:, 1] > 0).long()
    # Without the format, rows are lists of numbers.
    return Dataset.from_dict({"x": x.tolist(), "label": label.tolist()}).with_format("torch")


def train(
    batch_size: int = 16, samples: int = 512, stream: bool = False, epochs: int = 3, **options
):
    """Train a classifier of points. `batch_size` is that of one worker."""
    data, valid = points(samples, 1), points(101, 2)
    if stream:
        # Every worker reads the stream, and takes its share of each batch. `set_epoch` of its
        # shuffling is called.
        data = data.to_iterable_dataset(num_shards=4).shuffle(seed=0, buffer_size=64)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    history = allhands.SupervisedRunner(input_key="x", target_key="label").train(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        datasets={"batch_size": batch_size, "train": data, "valid": valid},
        metrics=["accuracy"],
        num_epochs=epochs,
        **options,
    )
    return model, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--stream", action="store_true")
    given = parser.parse_args()
    _, history = train(samples=given.samples, stream=given.stream)
    print("accuracy:", history["valid"]["accuracy"][-1])

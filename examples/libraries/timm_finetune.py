"""A model of timm whose last layer is trained first, and then all of it.

python timm_finetune.py
allhands launch -n 2 timm_finetune.py
"""

import argparse

import timm
import torch

import allhands
from allhands.data.catalogue import load

BODY = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")


def build() -> torch.nn.Module:
    """Where there is a hub: pretrained=True."""
    torch.manual_seed(0)
    return timm.create_model("resnet10t", pretrained=False, in_chans=1, num_classes=10)


def train(batch_size: int = 32, samples: int = 640, epochs: int = 2, **options):
    """Train on digits. `batch_size` is that of one worker."""
    model = build()
    images, labels = load("digits", limit=samples).tensors
    larger = torch.nn.functional.interpolate(images, scale_factor=4)
    data = torch.utils.data.TensorDataset(larger, labels)
    history = allhands.SupervisedRunner().train(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        datasets={"batch_size": batch_size, "train": data, "valid": data},
        metrics=["accuracy"],
        callbacks=[allhands.Freeze(*BODY, epochs=1)],
        num_epochs=epochs,
        **options,
    )
    return model, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=640)
    _, history = train(samples=parser.parse_args().samples)
    print("accuracy:", history["valid"]["accuracy"][-1])

"""A detector of torchvision, with mean average precision on workers with other numbers of images.

python torchvision_detection.py
allhands launch -n 2 torchvision_detection.py
"""

import argparse

import torch
from torch.utils.data import DataLoader
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import ssdlite320_mobilenet_v3_large

import allhands


def image(number: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A grey image of 64 x 64 with one to three bright squares."""
    generator = torch.Generator().manual_seed(number)
    picture = torch.rand(3, 64, 64, generator=generator) / 4
    count = int(torch.randint(1, 4, (), generator=generator))
    corners = torch.randint(0, 40, (count, 2), generator=generator)
    for x, y in corners.tolist():
        picture[:, y : y + 24, x : x + 24] += 0.7
    boxes = torch.cat([corners, corners + 24], dim=1).float()
    return picture, {"boxes": boxes, "labels": torch.ones(count, dtype=torch.int64)}


def as_lists(samples):
    """Images and targets, one each a sample."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class Detector(allhands.SupervisedRunner):
    def handle_batch(self, model, batch):
        images, targets = batch
        if not model.training:
            return model(images), targets  # a dict for each image
        losses = model(images, targets)
        return {"loss": sum(losses.values())}, targets


def train(batch_size: int = 4, samples: int = 32, epochs: int = 2, **options):
    """Train, and predict the boxes of the validation images. `batch_size` is that of one worker."""
    torch.manual_seed(0)
    model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2)
    data, valid = [image(number) for number in range(samples)], [image(-n) for n in range(1, 8)]
    loaders = {
        "train": DataLoader(data, batch_size, shuffle=True, collate_fn=as_lists),
        "valid": DataLoader(valid, batch_size, collate_fn=as_lists),
    }
    runner = Detector(model)
    history = runner.train(
        criterion=allhands.ModelLoss(over="samples"),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loaders=loaders,
        # In training a detector gives losses alone, and nothing that could be measured.
        metrics={"valid": {"box": MeanAveragePrecision()}},
        main_metric="box_map",
        minimize_metric=False,
        num_epochs=epochs,
        **options,
    )
    return model, history, runner.predict(loader=loaders["valid"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=32)
    _, history, found = train(samples=parser.parse_args().samples)
    print("mean average precision:", history["valid"]["box_map"][-1])
    print("boxes by image:", [len(image["boxes"]) for image in found])

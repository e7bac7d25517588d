"""How far the weights of two GPUs are from those of one, and what the two jobs reach. Needs two
GPUs.

    python benchmarks/gpu_agreement.py          # digits; and CIFAR-10, when ALLHANDS_DATA names its
    folder

The same model is trained from the same weights over the same global batches (128 samples) for 20
steps, on one GPU and on two under nccl; the figure is the largest difference of any parameter,
relative to that parameter's largest value. Beside it
stands what rounding alone does: one GPU with batches of 128 against one GPU with two accumulated
micro-batches of 64.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # float32 is to mean float32 here

import torch
from report import machine, save_json

from allhands import Callback, SupervisedRunner, models
from allhands.data import catalogue

JOBS = {
    "digits": {"width": 32, "epochs": 10, "lr": 3e-3},
    "cifar10": {"width": 64, "epochs": 6, "lr": 2e-3},
}


class After(Callback):
    """Stops after a number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.weights: dict[str, torch.Tensor] = {}

    def on_step_end(self, training: Any) -> None:
        if training.step == self.steps:
            self.weights = {
                key: value.detach().cpu().clone()
                for key, value in training.model.named_parameters()
            }

    def on_epoch_end(self, training: Any) -> None:
        training.stop("enough")

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def load_datasets(name: str) -> dict[str, Any]:
    return {split: catalogue.load(name, split) for split in ("train", "valid")}


def train(name: str, workers: int, batch: int, precision: str, epochs: int, **options: Any) -> Any:
    about = catalogue.info(name)
    channels, image_size, _ = about.input_shape
    torch.manual_seed(0)
    model = models.build(
        "simple_cnn",
        in_channels=channels,
        num_classes=about.num_classes,
        image_size=image_size,
        width=JOBS[name]["width"],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if not options:
        optimizer = torch.optim.AdamW(model.parameters(), lr=JOBS[name]["lr"])
    return SupervisedRunner().train(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=optimizer,
        num_epochs=epochs,
        metrics=["accuracy"],
        datasets={"batch_size": batch, "get_datasets_fn": load_datasets, "name": name},
        precision=precision,
        distributed=True,
        workers=workers,
        **options,
    )


def weights_after_20(
    name: str, workers: int, batch: int, precision: str, accumulate: int = 1
) -> dict[str, torch.Tensor]:
    # Digits have 12 steps an epoch; both jobs stop at the end of the epoch in which step 20 lies.
    keep = After(20 if name == "cifar10" else 11)
    train(name, workers, batch, precision, 1, callbacks=[keep], accumulate=accumulate)
    return keep.weights


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(
        float((ours[k].double() - theirs[k].double()).abs().max() / theirs[k].double().abs().max())
        for k in ours
    )


def main() -> None:
    found = {}
    for name, job in JOBS.items():
        if name == "cifar10" and not os.environ.get("ALLHANDS_DATA"):
            print("cifar10 left out: ALLHANDS_DATA is not set", file=sys.stderr)
            continue
        for precision in ("fp32", "bf16"):
            one = weights_after_20(name, 1, 128, precision)
            result = {
                "steps": 20 if name == "cifar10" else 11,
                "two GPUs against one": distance(weights_after_20(name, 2, 64, precision), one),
                "one GPU, other summation order": distance(
                    weights_after_20(name, 1, 64, precision, accumulate=2), one
                ),
            }
            for workers in (1, 2):
                started = time.perf_counter()
                history = train(name, workers, 128 // workers, precision, int(job["epochs"]))
                result[f"valid accuracy, {workers} GPU"] = history["valid"]["accuracy"][-1]
                result[f"seconds an epoch, {workers} GPU"] = round(min(history["seconds"]), 3)
                result[f"seconds in all, {workers} GPU"] = round(time.perf_counter() - started, 1)
            found[f"{name} {precision}"] = result
            print(name, precision, result, flush=True)
            keep(found)


def keep(found: dict[str, Any]) -> None:
    """Written after each job, so that a run that is cut short leaves what it has measured."""
    gpus = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, check=True
    ).stdout.count("GPU ")
    names = sorted({torch.cuda.get_device_name(number) for number in range(gpus)})
    save_json(
        "gpu_agreement",
        {"jobs": found, "machine": {**machine(), "gpus": f"{gpus} x {', '.join(names)}"}},
    )


main()

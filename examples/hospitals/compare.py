"""The table at the end: python compare.py DATA LOGDIR, after a run across the hospitals.

Each hospital alone and all patients in one place are trained here, with the same model, optimizer
and number of passes over the data. What the hospitals have reached together is what each measured
itself, on its own test patients.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import torch
import yaml
from hospital import load
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset

from allhands import models
from allhands.runner import SupervisedRunner

HERE = Path(__file__).parent
RUN = yaml.safe_load((HERE / "run.yml").read_text(encoding="utf-8"))
NAMES = RUN["strategy"]["sites"]["names"]


def trained(data) -> nn.Module:
    torch.manual_seed(0)
    options = dict(RUN["model"])
    model = models.build(options.pop("name"), **options)
    with contextlib.redirect_stdout(io.StringIO()):
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=RUN["optimizer"]["lr"]),
            datasets={"batch_size": RUN["data"]["batch_size"], "train": data},
            num_epochs=RUN["strategy"]["rounds"] * RUN["strategy"]["local_epochs"],
            valid_loader="train",
            verbose=False,
        )
    return model.eval()


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main(data: Path, logdir: Path) -> None:
    patients = {name: load(str(data / name)) for name in NAMES}
    together = {}
    for line in (logdir / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["kind"] == "evaluated":
            together[event["site"]] = event["accuracy"]
    alone = {name: trained(patients[name]["train"]) for name in NAMES}
    central = trained(ConcatDataset([patients[name]["train"] for name in NAMES]))

    print(
        "Accuracy on the hospital's own test patients, and on all others' of the model that was "
        "trained alone"
    )
    print(
        f"{'hospital':12} {'test':>5} {'alone':>7} {'(others)':>9} {'together':>9} "
        f"{'in one place':>13}"
    )
    sums, count = [0.0, 0.0, 0.0, 0.0], 0
    for name in NAMES:
        own = patients[name]["valid"]
        rest = [patients[other]["valid"] for other in NAMES if other != name]
        others = TensorDataset(*(torch.cat([part.tensors[k] for part in rest]) for k in (0, 1)))
        row = [
            accuracy(alone[name], own),
            accuracy(alone[name], others),
            together[name],
            accuracy(central, own),
        ]
        print(f"{name:12} {len(own):5} {row[0]:7.1%} {row[1]:9.1%} {row[2]:9.1%} {row[3]:13.1%}")
        sums, count = (
            [total + len(own) * value for total, value in zip(sums, row, strict=True)],
            count + len(own),
        )
    mean = [total / count for total in sums]
    print(f"{'all':12} {count:5} {mean[0]:7.1%} {mean[1]:9.1%} {mean[2]:9.1%} {mean[3]:13.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

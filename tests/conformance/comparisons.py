"""Rows that are compared in a way of their own."""

from __future__ import annotations

from typing import Any

import torch

from allhands import Callback
from tests.conformance.table import GLOBAL_BATCH, Row


class Averages(Callback):
    """Keeps a moving average of the model, as many do."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def on_step_end(self, training: Any) -> None:
        for name, value in training.model.state_dict().items():
            if name in self.kept:
                self.kept[name].mul_(0.8).add_(value.detach(), alpha=0.2)
            else:
                self.kept[name] = value.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def averages_resumed(row: Row, given: dict[str, Any]) -> float:
    """Train an epoch, and go on from its checkpoint with new objects; the averages of both
    epochs."""
    from allhands.comm import all_gather_text
    from allhands.world import current_world

    given["callbacks"].append(Averages())
    given["num_epochs"] = 1
    row.runner(device="cpu").train(**given)
    model = row.model()
    again = Averages()
    given |= {
        "model": model,
        "optimizer": row.optimizer(model),
        "resume": "auto",
        "num_epochs": row.epochs,
    }
    given["callbacks"] = [given["callbacks"][0], again]
    row.runner(device="cpu").train(**given)
    model, right = row.model(), Averages()
    optimizer, criterion, data = row.optimizer(model), row.criterion(), row.data()
    for _ in range(row.epochs):
        for first in range(0, len(data), GLOBAL_BATCH):
            x, y = data[first : first + GLOBAL_BATCH]
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            right.on_step_end(type("Now", (), {"model": model}))
    whole = {
        name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in again.kept.items()
    }
    # On a pipeline a rank has the averages of its own layers.
    world = current_world()
    named = (
        {name for text in all_gather_text(",".join(whole), world) for name in text.split(",")}
        if world
        else set(whole)
    )
    assert named == set(right.kept), named ^ set(right.kept)
    worst = [
        float((whole[name].double() - right.kept[name].double()).abs().max()) for name in whole
    ]
    apart = max(
        float((given["model"].state_dict()[k] - v).abs().max())
        for k, v in model.state_dict().items()
    )
    return max([apart, *worst])


class Scales(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, training: Any) -> None:
        self.seen.append(training.loop.precision.scaler.get_scale())


def scales_and_weights(row: Row, given: dict[str, Any]) -> float:
    """The loss scales of every step are those of one process; so are the weights, as far as fp16
    tells them apart."""
    scales = Scales()
    given["callbacks"].append(scales)
    row.runner(device="cpu").train(**given)
    found = []
    for pieces in (1, 2, 3, 4):  # what rounding does where gradients are added up over parts
        model, scaler = row.model(), torch.amp.GradScaler("cpu")
        optimizer, data, right = row.optimizer(model), row.data(), []
        for _ in range(row.epochs):
            for first in range(0, len(data), GLOBAL_BATCH):
                x, y = data[first : first + GLOBAL_BATCH]
                optimizer.zero_grad()
                for piece in range(pieces):
                    with torch.autocast("cpu", torch.float16):
                        loss = row.criterion()(
                            model(x.chunk(pieces)[piece]), y.chunk(pieces)[piece]
                        )
                    scaler.scale(loss / pieces).backward()
                scaler.step(optimizer)
                scaler.update()
                right.append(scaler.get_scale())
        found.append(model.state_dict())
    assert min(right) < 2.0**16, "nothing overflowed"
    assert scales.seen == right, f"scales {scales.seen}, right {right}"
    noise = max(float((other[k] - found[0][k]).abs().max()) for other in found[1:] for k in other)
    apart = max(
        float((given["model"].state_dict()[k] - v).abs().max()) for k, v in found[0].items()
    )
    return apart / max(3 * noise, 1e-6) * row.tolerance

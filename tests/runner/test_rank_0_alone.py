"""What a callback calls on rank 0 alone, and all ranks are needed for, is told by name within
seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allhands import FSDP, Callback, KVStore, LocalSGD, SupervisedRunner, Tensor
from allhands.errors import WorkerError
from tests.runner.problems import arguments, classification

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]
DATA = {"batch_size": 4, "own": classification(8)}
FIX = "call it on all ranks, without `if rank == 0`"


def barrier(training: Any) -> None:
    dist.barrier()


def own_all_reduce(training: Any) -> None:
    dist.all_reduce(torch.ones(3))


def gather_objects(training: Any) -> None:
    dist.all_gather_object([None, None], "mine")


def evaluate(training: Any) -> None:
    SupervisedRunner(training.model).evaluate(criterion=nn.CrossEntropyLoss(), datasets=DATA)


def predict(training: Any) -> None:
    SupervisedRunner(training.model, device="cpu").predict(dataset=classification(8))


def save(training: Any) -> None:
    training.save_checkpoint()


def forward(training: Any) -> None:
    training.model(classification(8).tensors[0])


def whole_weight(training: Any) -> None:
    next(training.model.parameters()).full_tensor()


class Alone(Callback):
    """Rank 0 makes the call after the second step, or at the end of the first epoch."""

    def __init__(self, call: Callable[[Any], None], path: Path, hook: str = "on_step_end") -> None:
        self.call, self.path, self.hook = call, path, hook

    def act(self, training: Any) -> None:
        if training.world.rank == 0:
            self.path.write_text(str(time.time()))
            self.call(training)

    def on_step_end(self, training: Any) -> None:
        if self.hook == "on_step_end" and training.step == 2:
            self.act(training)

    def on_epoch_end(self, training: Any) -> None:
        if self.hook == "on_epoch_end":
            self.act(training)

    def on_train_end(self, training: Any) -> None:
        if self.hook == "on_train_end":
            self.act(training)


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "kvstore": lambda: "kvstore",
    "kvstore with a server": lambda: KVStore(servers=1),
    "local_sgd": lambda: LocalSGD(every=4),
    "fsdp": FSDP,
    "tensor": lambda: Tensor(plan={"0": "colwise", "3": "rowwise"}),
    "pipeline": lambda: "pipeline",
}

CASES = [
    ("ddp", barrier, "on_step_end", "torch.distributed.barrier"),
    ("ddp", own_all_reduce, "on_epoch_end", "torch.distributed.all_reduce of 3 elements"),
    ("ddp", gather_objects, "on_train_end", "torch.distributed.all_gather_object"),
    ("ddp", evaluate, "on_epoch_end", "SupervisedRunner.evaluate()"),
    ("kvstore", predict, "on_step_end", "SupervisedRunner.predict()"),
    ("kvstore with a server", barrier, "on_epoch_end", "torch.distributed.barrier"),
    ("local_sgd", evaluate, "on_step_end", "SupervisedRunner.evaluate()"),
    ("fsdp", forward, "on_step_end", "torch.distributed.all_gather"),
    ("fsdp", whole_weight, "on_epoch_end", "torch.distributed.all_gather"),
    ("fsdp", save, "on_step_end", "saving a checkpoint after optimizer step 2"),
    ("tensor", evaluate, "on_epoch_end", "SupervisedRunner.evaluate()"),
    ("pipeline", barrier, "on_step_end", "torch.distributed.barrier"),
]


@pytest.mark.parametrize(
    ("strategy", "call", "hook", "name"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_it_is_named_on_every_strategy(
    strategy: str, call: Any, hook: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match="the ranks do not make the same calls") as raised:
        SupervisedRunner(device="cpu").train(
            **arguments(callbacks=[Alone(call, tmp_path / "at", hook)]),
            logdir=tmp_path / "log",
            distributed=STRATEGIES[strategy](),
            workers=2,
        )
    assert time.time() - float((tmp_path / "at").read_text()) < 10
    text = str(raised.value)
    line = call.__code__.co_firstlineno + 1
    assert f"rank 0 is in '{name}" in text, text
    assert f"{__file__}:{line} in {call.__name__}; in Alone {hook}) while rank 1 " in text, text
    assert FIX in text

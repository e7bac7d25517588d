"""Predictions of models that give more than a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner, UserError
from tests.worlds import in_world

VALUES = torch.tensor([3.0, 0.0, 2.0, 1.0, 5.0, 0.0, 4.0])


@dataclass
class Fields:
    logits: torch.Tensor
    hidden: Any = None


class Gives(nn.Module):
    """Gives what a function makes of the input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.unused = kind, nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "list":  # as many boxes as the value says, each of the value
            return [
                {
                    "boxes": torch.full((int(value), 4), float(value)),
                    "labels": torch.arange(int(value)),
                    "area": value.double(),
                    "mask": torch.full((int(value), 2, int(value)), True),
                }
                for value in x
            ]
        if self.kind == "fields":
            return Fields(torch.stack([x, -x], 1))
        if self.kind == "with loss":
            return {"loss": x.mean(), "logits": x, "hidden": torch.stack([x, x])}
        if self.kind == "few":
            return [{"a": x}]
        return Fields(x, object())


def predict(kind: str, batch: int = 2, **options: Any) -> Any:
    loader = DataLoader(TensorDataset(VALUES), batch)
    return SupervisedRunner(Gives(kind), device="cpu", **options).predict(
        loader=loader, distributed=torch.distributed.is_initialized()
    )


def check_list(rows: Any) -> None:
    assert len(rows) == len(VALUES)
    for row, value in zip(rows, VALUES.tolist(), strict=True):
        assert row["boxes"].tolist() == [[value] * 4] * int(value)
        assert row["labels"].tolist() == list(range(int(value)))
        assert row["area"].shape == ()
        assert row["area"].dtype == torch.float64
        assert row["area"].item() == value
        assert row["mask"].shape == (value, 2, value)
        assert row["mask"].dtype == torch.bool


def all_kinds() -> None:
    for batch in (1, 2, 4):  # in the last step a rank of three has no row
        check_list(predict("list", batch))
        fields = predict("fields", batch)
        assert list(fields) == ["logits", "hidden"]
        assert torch.equal(fields["logits"], torch.stack([VALUES, -VALUES], 1))
        assert fields["hidden"] is None
        assert torch.equal(predict("with loss", batch, output_key="logits"), VALUES)


def test_lists_and_dataclasses() -> None:
    all_kinds()


@pytest.mark.serial
def test_lists_and_dataclasses_of_three_workers() -> None:
    in_world(3, all_kinds)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("with loss", {}, r"shape \[\] for a batch of 2 rows.*output_key='logits'.* 'hidden'"),
        ("few", {}, "a list of 1 dicts for a batch of 2 rows"),
        ("object", {}, r"the model gave a object; .*output_key=…\) takes one part"),
        ("fields", {"output_key": "logit"}, "has 'logits', 'hidden'; did you mean 'logits'"),
        ("list", {"output_key": "boxes"}, "is a list, which names nothing"),
    ],
)
def test_what_is_no_row_a_sample_is_refused(kind: str, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        predict(kind, **options)

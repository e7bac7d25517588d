"""Results are data: what is data comes back equal, what is not is refused by name."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allhands.errors import UserError
from allhands.launch import results


def round_trip(value: Any, folder: Path) -> Any:
    return results.load(results.dump(value, str(folder / "result")))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "é", True, None, {"a": [1]}],
        float("inf"),
        2**100,
        (1, "a"),
        {1: 2, (1, 2): 3},
        {"x", "y"},
        b"\0\xff",
        1 + 2j,
        {"tuple": (1, [2])},
    ],
)
def test_plain_values(value: Any, tmp_path: Path) -> None:
    got = round_trip(value, tmp_path)
    assert got == value
    assert type(got) is type(value)


def test_tensors_and_arrays(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(3)
    weight = torch.randn(3, dtype=torch.bfloat16)
    value = {
        "state": model.state_dict(),
        "shared": [weight, weight[1:]],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "arrays": [
            np.arange(4, dtype=np.int16),
            np.float32(1.5),
            np.bool_(True),
            np.array(["a", "bc"]),
            np.array([1 + 2j]),
        ],
        "shape": torch.Size([1, 2]),
    }
    got = round_trip(value, tmp_path)
    assert isinstance(got["state"], OrderedDict)
    assert torch.equal(got["state"]["running_var"], torch.ones(3))
    got["shared"][0][1] = 7
    assert got["shared"][1][0] == 7
    assert isinstance(got["parameter"], torch.nn.Parameter)
    for one, other in zip(got["arrays"], value["arrays"], strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "result is a builtins.object. A worker may return None"),
        (
            {"model": [torch.nn.Linear(1, 1)]},
            r"result\['model'\]\[0\] is a torch.nn.modules.linear.Linear; return its state_dict",
        ),
        ((Pair(1, 2),), r"result\[0\] is a .*Pair"),
        (np.array([object()]), "result is a numpy.ndarray"),
        (lambda: 0, "result is a builtins.function"),
    ],
)
def test_what_is_not_data(value: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=text):
        results.dump(value, str(tmp_path / "result"))


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("executed",)

    path = tmp_path / "result"
    torch.save(Evil(), path)
    with pytest.raises(pickle.UnpicklingError):
        results.load({"file": str(path)})

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from allhands.data import is_samples, map_tensors, named_members, rows_in, tensors_in, to_device

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Fields:
    x: Any
    y: Any = None


class Encoding(UserDict):
    """A mapping whose items are attributes too, as what tokenizers of transformers give."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "data":
            raise AttributeError(name)
        return self.data[name]


class Moved:
    """Moves itself, as batches of PyTorch Geometric do."""

    def __init__(self, rows: int) -> None:
        self.num_graphs = rows
        self.x = torch.ones(7)

    def to(self, device: torch.device) -> Moved:
        self.x = self.x.to(device)
        return self


def test_containers_keep_their_classes() -> None:
    one = torch.ones(2)
    tree = {"a": [one, (one, "text")], "p": Pair(one, None), "f": Fields(one), "e": Encoding(x=one)}
    made = map_tensors(tree, lambda tensor: tensor + 1)
    assert torch.equal(made["a"][0], one + 1)
    assert made["a"][1][1] == "text"
    assert isinstance(made["p"], Pair)
    assert torch.equal(made["p"].x, one + 1)
    assert isinstance(made["f"], Fields)
    assert torch.equal(made["f"].x, one + 1)
    assert torch.equal(made["e"].x, one + 1)
    assert torch.equal(tree["f"].x, one)
    assert torch.equal(tree["e"].x, one)
    assert len(tensors_in(tree)) == 5
    fixed = map_tensors(MappingProxyType({"x": one}), lambda tensor: tensor + 1)
    assert torch.equal(fixed["x"], one + 1)


def test_a_batch_is_moved_with_the_objects_in_it() -> None:
    batch = (Fields(torch.ones(2), Moved(3)), "text", None)
    fields, *rest = to_device(batch, torch.device("meta"))
    assert fields.x.device.type == fields.y.x.device.type == "meta"
    assert rest == ["text", None]


def image() -> torch.Tensor:
    return torch.rand(3, 8, 8)


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (torch.ones(4, 2), 4),
        (torch.ones(()), None),
        (Moved(5), 5),
        ([{"boxes": torch.ones(7, 4)}, {"boxes": torch.ones(0, 4)}], 2),
        (((image(), image()), ({"boxes": torch.ones(7, 4)}, {"boxes": torch.ones(1, 4)})), 2),
        (([torch.ones(6, 1), torch.ones(6)], torch.ones(6)), 6),
        ({"x": {"a": torch.ones(3)}, "y": {"b": torch.ones(3, 2)}}, 3),
        (({"a": torch.ones(3)}, {"b": torch.ones(2)}), None),
        (Fields({"a": torch.ones(3)}), 3),
        ({"loss": torch.ones(()), "logits": torch.ones(9, 2)}, 9),
        ("text", None),
        ([], None),
    ],
)
def test_rows_in(value: Any, rows: int | None) -> None:
    assert rows_in(value) == rows


def test_tensors_in_a_list_may_be_one_a_sample() -> None:
    batch = ([image(), image()], ["a", "b"])
    assert rows_in(batch, in_lists=False) is None
    assert rows_in(({"x": torch.ones(4)}, ["a"]), in_lists=False) == 4


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"x": 1, "y": 2}, ["x", "y"]),
        (Encoding(x=1), ["x"]),
        (Fields(1), ["x", "y"]),
        (Pair(1, 2), ["x", "y"]),
        (SimpleNamespace(x=1), ["x"]),
        (torch.ones(1), None),
        ([1], None),
        (None, None),
        (3, None),
    ],
)
def test_named_members(value: Any, names: list[str] | None) -> None:
    found = named_members(value)
    assert found is None if names is None else list(found or ()) == names
    assert found is None or isinstance(found, Mapping)


def test_samples_are_a_list_of_dicts() -> None:
    assert is_samples([{"a": 1}])
    assert not is_samples([])
    assert not is_samples(({"a": 1},))
    assert is_samples(({"a": 1},), (list, tuple))
    assert not is_samples([{"a": 1}, torch.ones(1)])

"""What a worker does to the caller's objects is in these objects afterwards."""

from __future__ import annotations

import collections
import os
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from allhands.launch import handback, ship


def through_a_worker(value: Any, change: Any, folder: Path) -> tuple[list[str], list[str]]:
    """Send a value, change what arrives, and hand it back; what each side could not do."""
    sent, path = ship.Numbered(), str(folder / "back")
    handback.arrived = handback.Arrived(path)
    try:
        got = ship.load(ship.dump(value, str(folder), sent), handback.arrived.numbered)
        for item in got if isinstance(got, tuple) else (got,):
            if isinstance(item, nn.Module):
                handback.remember(item)
        change(got)
        lost = handback.write({"value": got})
    finally:
        handback.arrived = None
    return lost, handback.apply(path, sent)


class Box:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def test_containers_and_attributes_stay_the_same_objects(tmp_path: Path) -> None:
    box = Box(
        rows=[1],
        by_name={"a": 1},
        names={"x"},
        last=collections.deque([1, 2], maxlen=2),
        array=np.zeros(3),
        gone=1,
    )
    box.me, box.also = box, box.rows
    parts = dict(vars(box))

    def change(got: Any) -> None:
        got.rows.append(got.names)
        got.by_name["b"] = Box(of=got)
        got.names.add("y")
        got.last.append(3)
        got.array += 1
        got.more = (got.rows, 7)
        del got.gone

    assert through_a_worker(box, change, tmp_path) == ([], [])
    assert {
        name: vars(box)[name] is value for name, value in parts.items() if name != "gone"
    } == dict.fromkeys(set(parts) - {"gone"}, True)
    assert box.rows == [1, box.names]
    assert box.rows[1] is box.names is not None
    assert box.by_name["b"].of is box
    assert box.names == {"x", "y"}
    assert list(box.last) == [2, 3]
    assert box.array.tolist() == [1, 1, 1]
    assert box.more[0] is box.rows
    assert not hasattr(box, "gone")


def test_names_of_the_script_and_of_closures(tmp_path: Path) -> None:
    def counter() -> Any:
        count = 0

        def add() -> int:
            nonlocal count
            count += 1
            seen.append(count)
            return count

        return add

    script: dict[str, Any] = {"__name__": "__main__", "seen": [], "total": 0}
    exec(
        "def note(x):\n    global total\n    total += x\n    seen.append(x)\nclass Kept:\n    many "
        "= []\n    n = 0",
        script,
    )
    seen: list[int] = []
    add = counter()

    def change(got: Any) -> None:
        got[0](3)
        got[1]()
        type(got[2]).many.append(1)
        type(got[2]).n += 1

    assert through_a_worker((script["note"], add, script["Kept"]()), change, tmp_path) == ([], [])
    assert (script["seen"], script["total"]) == ([3], 3)
    assert add() == 2
    assert seen == [1, 2]
    assert (script["Kept"].many, script["Kept"].n) == ([1], 1)


def test_a_model_and_its_optimizer_are_as_the_worker_left_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.1)
    first, mean, last = model[0].weight, model[1].running_mean, model[2].weight
    seen: dict[str, torch.Tensor] = {}

    def change(got: Any) -> None:
        net, opt = got
        prune.l1_unstructured(net[2], "weight", 0.5)
        opt.add_param_group({"params": list(net[0].parameters()), "lr": 0.5})
        net[1].register_buffer("running_mean", torch.zeros(5))
        net[1] = nn.Identity()
        net.scale = 3.0
        net(torch.ones(3, 2)).sum().backward()
        opt.step()
        net.eval()
        seen.update({name: value.clone() for name, value in net.state_dict().items()})

    assert through_a_worker((model, optimizer), change, tmp_path) == ([], [])
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in seen.items()
    }
    assert model[0].weight is first
    assert model[2].weight_orig is last
    assert (mean.shape, model.scale, model.training) == ((2,), 3.0, False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert optimizer.param_groups[1]["params"][0] is first
    assert set(optimizer.state) == {first, model[0].bias, last, model[2].bias}
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()


def test_tensors_in_the_place_of_others_go_into_those(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(2)
    weight, mean = model.weight, model.running_mean

    def change(got: Any) -> None:
        got.weight = nn.Parameter(torch.full((3,), 4.0, dtype=torch.float64))
        got.running_mean = torch.full((2,), 5.0)

    assert through_a_worker(model, change, tmp_path) == ([], [])
    assert model.weight is weight
    assert (weight.tolist(), weight.dtype) == ([4, 4, 4], torch.float64)
    assert model.running_mean is mean
    assert mean.tolist() == [5, 5]


def test_what_is_unchanged_is_not_written(tmp_path: Path) -> None:
    box = Box(big=torch.ones(1 << 20), view=None, small=torch.ones(3))
    box.view = box.big[5:9]

    def change(got: Any) -> None:
        got.small[0] = 2
        got.new_view = got.big[:2]

    through_a_worker(box, change, tmp_path)
    assert os.path.getsize(tmp_path / "back") < 1 << 16
    assert box.small.tolist() == [2, 1, 1]
    box.big[1] = 7
    assert box.new_view.tolist() == [1, 7]


def test_expanded_lazy_and_sparse_tensors(tmp_path: Path) -> None:
    lazy = nn.LazyLinear(2)
    box = Box(wide=torch.zeros(1).expand(3), lazy=lazy, sparse=torch.zeros(2, 2).to_sparse())
    parameter = lazy.weight

    def change(got: Any) -> None:
        got.wide.set_(torch.tensor([1.0, 2.0, 3.0]))
        got.lazy(torch.ones(1, 4))
        got.sparse.copy_(torch.eye(2).to_sparse())

    assert through_a_worker(box, change, tmp_path) == ([], [])
    assert box.wide.tolist() == [1, 2, 3]
    assert type(lazy) is nn.Linear
    assert lazy.weight is parameter
    assert lazy(torch.ones(1, 4)).shape == (1, 2)
    assert box.sparse.to_dense().tolist() == [[1, 0], [0, 1]]


def test_what_cannot_be_handed_back_is_named_and_all_else_comes(tmp_path: Path) -> None:
    box, model = Box(rows=[], lock=None), nn.Linear(2, 2)

    def change(got: Any) -> None:
        got[0].rows.append(1)
        got[0].lock = threading.Lock()
        parametrize.register_parametrization(got[1], "weight", nn.Softplus())
        with torch.no_grad():
            got[1].bias.fill_(7)

    lost, failed = through_a_worker((box, model), change, tmp_path)
    assert (len(lost), failed) == (1, [])
    assert "Box lock, _thread.lock: cannot pickle" in lost[0]
    assert (box.rows, box.lock) == ([1], None)
    assert model.bias.tolist() == [7, 7]
    assert parametrize.is_parametrized(model)
    assert torch.equal(model.weight, nn.functional.softplus(model.parametrizations.weight.original))


def test_states_of_a_class_of_its_own_way(tmp_path: Path) -> None:
    script: dict[str, Any] = {"__name__": "__main__"}
    source = (
        "class Slotted:\n    __slots__ = ('a', 'b')\n"
        "class Partly:\n    def __getstate__(self): return {'n': self.n}\n"
        "    def __setstate__(self, state): self.__dict__.update(state, file='new')"
    )
    exec(source, script)
    slotted, partly = script["Slotted"](), script["Partly"]()
    slotted.a, partly.n, partly.file = 1, 1, "mine"

    def change(got: Any) -> None:
        got[0].b = [got[0]]
        got[1].n = 2

    assert through_a_worker((slotted, partly), change, tmp_path) == ([], [])
    assert slotted.b[0] is slotted
    assert (partly.n, partly.file) == (2, "mine")


@pytest.fixture(autouse=True)
def _classes_by_value() -> Any:
    import sys

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])

"""What is shipped arrives as it was: identities, views, and memory that workers share until they
write."""

from __future__ import annotations

import os
import re
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.launch import ship, spawn
from allhands.launch.unpicklable import explain, name_arguments


def round_trip(value: Any, folder: Path) -> Any:
    return ship.load(ship.dump(value, str(folder)))


def test_an_optimizer_updates_the_model_that_came_with_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    got_model, got_optimizer = round_trip((model, optimizer), tmp_path)
    assert got_model[2].weight is got_model[0].weight
    assert got_optimizer.param_groups[0]["params"][0] is got_model[0].weight
    for name, value in model.state_dict().items():
        assert torch.equal(got_model.state_dict()[name], value)
    moment = got_optimizer.state[got_model[0].weight]["exp_avg"]
    assert torch.equal(moment, optimizer.state[model[0].weight]["exp_avg"])
    before = got_model[0].weight.clone()
    got_model(torch.randn(4, 3)).sum().backward()
    got_optimizer.step()
    assert not torch.equal(before, got_model[0].weight)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.uint16,
        torch.float8_e4m3fn,
    ],
)
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    got = round_trip(tensor, tmp_path)
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


def test_views_share_memory_and_strides_stay(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    got = round_trip(
        {"base": base, "row": base[1], "columns": base.t()[::2], "again": base}, tmp_path
    )
    got["base"][1, 0] = -1
    assert got["row"][0] == -1
    assert got["columns"][0, 1] == -1
    assert got["columns"].stride() == base.t()[::2].stride()
    assert got["again"] is got["base"]
    assert base[1, 0] == 6, "the sender keeps its own"


def test_special_tensors(tmp_path: Path) -> None:
    values = [
        torch.empty(0),
        torch.empty(0, 3),
        torch.tensor(5),
        torch.ones(2, 2).to_sparse(),
        torch.empty(3, device="meta"),
    ]
    empty, empty2, scalar, sparse, meta = round_trip(values, tmp_path)
    assert (empty.shape, empty2.shape, int(scalar), meta.device.type) == ((0,), (0, 3), 5, "meta")
    assert torch.equal(sparse.to_dense(), torch.ones(2, 2))
    leaf = round_trip(torch.ones(2, requires_grad=True), tmp_path)
    (leaf * 2).sum().backward()
    assert leaf.grad.tolist() == [2.0, 2.0]


def test_numpy_arrays(tmp_path: Path) -> None:
    frozen = np.arange(5000.0)
    frozen.flags.writeable = False
    values = [
        np.arange(3),
        np.arange(10_000).reshape(100, 100),
        np.asfortranarray(np.eye(100)),
        frozen,
        np.array(["a", None], object),
    ]
    got = round_trip(values, tmp_path)
    for one, other in zip(got, values, strict=True):
        assert one.dtype == other.dtype
        assert (one == other).all()
        assert one.flags.writeable == other.flags.writeable
        assert one.flags.f_contiguous == other.flags.f_contiguous
    got[1][0, 0] = 7
    assert values[1][0, 0] == 0


def test_data_are_aligned_and_private(tmp_path: Path) -> None:
    path = ship.dump([torch.ones(3), torch.ones(5), np.ones(2000)], str(tmp_path))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    first, second, third = ship.load(path)
    assert [
        address % 64 for address in (first.data_ptr(), second.data_ptr(), third.ctypes.data)
    ] == [0, 0, 0]
    first[0] = 9
    assert ship.load(path)[0][0] == 1, "writes do not reach the file"


def test_a_private_folder_with_room_enough() -> None:
    folder = ship.make_directory(1000)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    os.rmdir(folder)
    folder = ship.make_directory(1 << 60)
    assert not folder.startswith("/dev/shm/")
    os.rmdir(folder)


def test_no_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, part: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ship, "_write", full)
    with pytest.raises(
        UserError, match=r"cannot write 1 MiB for the workers to .*: No space left on device; free"
    ):
        ship.dump(torch.ones(1 << 18), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.serial
@pytest.mark.usefixtures("mark")
def test_workers_share_one_copy_until_they_write() -> None:
    data = torch.zeros(16 << 20, dtype=torch.uint8)

    def work(data: torch.Tensor) -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        data.sum()
        dist.barrier()  # a page that only one worker has read so far counts as that worker's own
        private, ours = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
                ours = "shipped-" in line
            elif ours and line.startswith("Private_Dirty:"):
                private += int(line.split()[1])
        data[rank] = 1
        dist.barrier()
        return private, data[:2].tolist()

    results = spawn(work, (data,), workers=2)
    assert [private < 1024 for private, _ in results] == [True, True], "reading copies nothing"
    assert [values for _, values in results] == [[1, 0], [0, 1]]


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("arguments", "path", "kind"),
    [
        (lambda m: (m, 1), "model.0.inner.lock", "_thread.lock"),
        (lambda m: (1, [0, {"key": Locked()}]), "data[1]['key'].lock", "_thread.lock"),
        (lambda m: (1, (x for x in "ab")), "data", "generator"),
        (lambda m: (1, sys._getframe()), "data", "frame"),
    ],
)
def test_what_cannot_be_pickled_is_named(arguments: Any, path: str, kind: str) -> None:
    def train(model: Any, data: Any) -> None: ...

    model = nn.Sequential(nn.Linear(2, 2))
    model[0].inner = Locked()
    args = arguments(model)
    with pytest.raises(UserError) as raised:
        spawn(train, args, workers=1)
    assert str(raised.value).startswith(f"`{path}`")
    assert f" is a {kind}, which cannot be sent to the workers: " in str(raised.value)
    assert "get_datasets_fn" in str(raised.value)


def test_what_a_function_uses_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"`lock \(used by fn\)` is a _thread.lock"):
        spawn(lambda: lock.locked() or None, workers=1)


def test_arguments_have_the_names_of_the_function() -> None:
    def train(model: Any, *rest: Any, epochs: int) -> None: ...

    assert name_arguments(train, (1, 2), {"epochs": 3}) == {"model": 1, "args[1]": 2, "epochs": 3}


def test_a_part_that_only_fails_with_others() -> None:
    assert "cannot be sent to the workers together: odd" in str(
        explain(ValueError("odd"), {"a": 1})
    )


def test_a_script_function_that_sets_flags_of_a_backend(tmp_path: Path) -> None:
    script: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    source = (
        "def fast():\n    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark\n   "
        " return torch.backends.cudnn"
    )
    # As cloudpickle sees a function of a script: by value, with the modules that it names.
    exec(source, script)
    script["fast"].__module__ = "__main__"
    assert round_trip(script["fast"], tmp_path)() is torch.backends.cudnn


def test_modules_with_parametrizations_arrive(tmp_path: Path) -> None:
    from torch.nn.utils import parametrizations

    for kind in (
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    ):
        model = kind(torch.nn.Linear(4, 4)).eval()
        got = round_trip(model, tmp_path)
        x = torch.rand(3, 4)
        assert torch.equal(got(x), model(x))
        assert [name for name, _ in got.named_parameters()] == [
            name for name, _ in model.named_parameters()
        ]
        with torch.no_grad():
            got.weight = torch.eye(4) * 2
            assert not torch.equal(got(x), model(x)), "the copy has tensors of its own"

"""A process alone: queries, settings, the timeline, objects, samplers."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import allhands.horovod.torch as hvd
from allhands.errors import UserError
from allhands.horovod import engine, objects, settings, util
from allhands.horovod.process_sets import ProcessSet


@pytest.fixture
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize(
    "query",
    [
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.local_size,
        hvd.cross_rank,
        hvd.cross_size,
        hvd.is_homogeneous,
        hvd.mpi_threads_supported,
        hvd.barrier,
        hvd.join,
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.DistributedOptimizer(
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        ),
        lambda: hvd.start_timeline("t.json"),
        lambda: hvd.add_process_set([0]),
    ],
)
def test_before_init_everything_says_so(query) -> None:
    with pytest.raises(ValueError, match=r"use hvd\.init\(\) first|after hvd\.init\(\)"):
        query()
    assert not hvd.is_initialized()


def test_a_process_alone(alone: None) -> None:
    assert (
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
    ) == (0, 1, 0, 1, 0, 1)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    x = torch.tensor([1.0, 2.0])
    assert hvd.allreduce(x, prescale_factor=3.0).tolist() == [3.0, 6.0]
    assert x.tolist() == [1.0, 2.0]
    assert hvd.allgather(x).tolist() == x.tolist()
    assert hvd.alltoall(x, splits=[2])[1].tolist() == [2]
    assert hvd.reducescatter(x).tolist() == x.tolist()
    assert hvd.join() == 0
    assert hvd.broadcast_object({"a": (1, np.float64(2.0))}) == {"a": (1, 2.0)}
    assert hvd.gloo_built()
    assert not hvd.mpi_enabled()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"[]\n",
        b'{"rank": 0, "token": "wrong"}\n',
        b'{"rank": 5, "token": 1}\n',
        b"x" * 5000,
        b"\xff\n",
    ],
)
def test_strangers_are_not_listened_to(said: bytes, alone: None) -> None:
    coordinator = engine.current()._link._coordinator
    assert coordinator is not None
    with socket.create_connection(("127.0.0.1", coordinator.port), timeout=10) as link:
        link.sendall(said)
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_WR)
            while link.recv(100):
                pass
    assert hvd.allreduce(torch.ones(1), name="after").item() == 1.0


def test_the_parts_of_a_world_are_refused(alone: None) -> None:
    hvd.shutdown()
    with pytest.raises(UserError, match=r"leave comm out, and give process_sets"):
        hvd.init(comm=[0, 1])
    with pytest.raises(UserError, match=r"set process_sets to a list of hvd.ProcessSet"):
        hvd.init(process_sets="static")
    hvd.init(comm=[0], process_sets="dynamic")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: hvd.allreduce(torch.ones(2, 3).t()),
            r"is not contiguous; give tensor.contiguous\(\)",
        ),
        (lambda: hvd.allreduce(3.0), "is a float, and has to be a dense torch.Tensor"),
        (
            lambda: hvd.allreduce(torch.ones(1).to_sparse()),
            "is a tensor of layout torch.sparse_coo",
        ),
        (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "leave average= out"),
        (lambda: hvd.allgather(torch.tensor(1.0)), r"give tensor.reshape\(1\)"),
        (lambda: hvd.grouped_allreduce([]), "the list of tensors is empty"),
        (
            lambda: hvd.alltoall(torch.ones(3), splits=[2]),
            "set splits to 1 numbers of at least 0 whose sum is 3",
        ),
        (lambda: hvd.reducescatter(torch.ones(3), op=hvd.Max), "set op to hvd.Average or hvd.Sum"),
        (lambda: hvd.broadcast(torch.ones(1), 1), "root_rank=1 is none of the ranks"),
        (
            lambda: hvd.allreduce(torch.ones(1), process_set=ProcessSet([0])),
            "is not in use; call hvd.add_process_set",
        ),
        (lambda: hvd.add_process_set([0, 7]), "rank 7 does not exist"),
        (lambda: ProcessSet([0, 0]), "set ranks to one or more different ranks"),
        (lambda: hvd.start_timeline("/nowhere/t.json"), "cannot be written"),
        (lambda: hvd.start_timeline("t.json", mark_cycles=True), "leave it out"),
        (
            lambda: hvd.sparse_allreduce_async(torch.ones(2), "x", hvd.Sum),
            "call hvd.allreduce_async",
        ),
        (
            lambda: hvd.elastic.run_fn(lambda state: state, hvd.shutdown)(3),
            "give a state, such as hvd.elastic.TorchState",
        ),
        (lambda: hvd.elastic.ObjectState(commit=1), "choose another name"),
    ],
)
def test_what_cannot_be_honoured_is_refused(call, text: str, alone: None) -> None:
    with pytest.raises(UserError, match=text):
        call()


def test_settings_come_from_horovods_variables() -> None:
    given = {
        "HOROVOD_FUSION_THRESHOLD": "1024",
        "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "2.5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_START_TIMEOUT": "30",
    }
    assert settings.read(given) == settings.Settings(1024, 0, 2.5, 9.0, "t.json", 30.0)
    assert settings.read({}) == settings.Settings()
    assert settings.read({"HOROVOD_TIMELINE": "dynamic"}).timeline == ""
    assert settings.read({"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_warn == 0
    with pytest.raises(
        UserError,
        match=r"HOROVOD_FUSION_THRESHOLD='many': set HOROVOD_FUSION_THRESHOLD to a number",
    ):
        settings.read({"HOROVOD_FUSION_THRESHOLD": "many"})


def test_helpers_that_scripts_import() -> None:
    assert util.extension_available("torch")
    assert not util.extension_available("mxnet")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__)
    with pytest.raises(ImportError, match="horovod.mxnet is not here: install mxnet, or use"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)
    assert [number for number in range(10) if util.num_rank_is_power_2(number)] == [1, 2, 4, 8]
    assert util.split_list(range(8), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert util.is_iterable("a")
    assert not util.is_iterable(3)


def test_the_timeline_is_a_chrome_trace(alone: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    hvd.start_timeline(str(path))
    with pytest.raises(UserError, match="call hvd.stop_timeline"):
        hvd.start_timeline(str(path))
    hvd.allreduce(torch.ones(1), name="loss")
    assert "NEGOTIATE_ALLREDUCE" in path.read_text(), "it can be read while it is written"
    hvd.stop_timeline()
    events = [event for event in json.loads(path.read_text()) if event]
    assert [event["ph"] for event in events] == ["M", "B", "E", "B", "E"]
    assert [event["name"] for event in events if "name" in event] == [
        "process_name",
        "NEGOTIATE_ALLREDUCE",
        "ALLREDUCE",
    ]
    times = [event["ts"] for event in events[1:]]
    assert times == sorted(times)


def test_objects_that_could_run_something_are_refused() -> None:
    class Runs:
        def __reduce__(self):
            return (print, ("run",))

    for held in (Runs(), {"deep": [Path("x")]}):
        with pytest.raises(UserError, match="it holds the class"):
            objects.unpack(objects.pack(held))
    plain = {
        "a": [1, 2.5, None, True, "text", b"raw", (1, {3})],
        "t": torch.arange(2),
        "n": np.arange(2),
    }
    back = objects.unpack(objects.pack(plain))
    assert back["a"] == plain["a"]
    assert back["t"].tolist() == back["n"].tolist() == [0, 1]


def test_the_sampler_goes_on_where_it_was(alone: None) -> None:
    sampler = hvd.elastic.ElasticSampler(range(10), seed=1)
    order = list(sampler)
    assert sorted(order) == list(range(10))
    sampler.record_batch(0, 4)
    assert list(sampler) == order, "a loader that is being read keeps its order"
    other = hvd.elastic.ElasticSampler(range(10), seed=1)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == order[4:]
    assert len(other) == 6
    other.set_epoch(1)
    assert list(other) != order
    assert sorted(other) == list(range(10))
    assert list(hvd.elastic.ElasticSampler(range(3), shuffle=False)) == [0, 1, 2]


def test_a_state_goes_back_to_what_was_kept(alone: None) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=3)
    state.commit()
    kept = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.epoch = 4
    assert not torch.equal(model.weight, kept)
    state.restore()
    assert torch.equal(model.weight, kept)
    assert state.epoch == 3
    assert not optimizer.state

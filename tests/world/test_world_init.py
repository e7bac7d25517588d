"""`init` in this one process: what it refuses before it meets anybody, and what a second call may
say."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allhands
from allhands import UserError, WorldError
from allhands.world import Layout, devices, interface, membership
from tests.world.forked_processes import WORLD_PREFIXES


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import os

    for name in [name for name in os.environ if name.startswith(WORLD_PREFIXES)]:
        monkeypatch.delenv(name)
    yield
    allhands.finalize()
    if dist.is_initialized():
        dist.destroy_process_group()


def free_method() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_alone() -> None:
    world = allhands.init(device="cpu")
    assert (
        world.rank,
        world.local_rank,
        world.node_rank,
        world.world_size,
        world.local_world_size,
    ) == (0, 0, 0, 1, 1)
    assert (world.backend, world.environment, world.device) == (
        "none",
        "alone",
        torch.device("cpu"),
    )
    assert world.is_main
    assert world.is_alone
    assert not dist.is_initialized()
    assert allhands.current_world() is world
    allhands.finalize()
    assert allhands.current_world() is None
    allhands.finalize()


def test_a_method_makes_a_group_of_one_and_finalize_takes_it_away() -> None:
    for _ in range(2):  # also a second time in one process
        world = allhands.init(
            init_method=free_method(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=20),
            device="cpu",
        )
        assert (world.backend, world.environment) == ("gloo", "explicit")
        assert dist.get_world_size() == 1
        allhands.finalize()
        assert not dist.is_initialized()


def test_a_repeated_init_returns_the_same_world() -> None:
    world = allhands.init(timeout=20, device="cpu")
    assert allhands.init() is world
    assert allhands.init(timeout=20) is world
    assert allhands.init(timeout=timedelta(seconds=20), device="cpu", rank=0, world_size=1) is world


@pytest.mark.parametrize(
    "asked",
    [
        {"world_size": 2, "rank": 0},
        {"timeout": 21},
        {"init_method": "env://"},
        {"local_rank": 1},
        {"device": "cuda:1"},
    ],
)
def test_a_different_init_is_an_error(asked: dict[str, Any]) -> None:
    allhands.init(timeout=20, device="cpu")
    with pytest.raises(WorldError, match=r"already has a world with .*finalize\(\)"):
        allhands.init(**asked)


def test_adopts_the_callers_group(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    with pytest.raises(WorldError, match="already runs with 'gloo'"):
        allhands.init(backend="nccl")
    with pytest.raises(WorldError, match="world_size=2"):
        allhands.init(rank=0, world_size=2)
    world = allhands.init(device="cpu")
    assert (world.backend, world.environment, world.world_size) == ("gloo", "torch.distributed", 1)
    allhands.finalize()
    assert dist.is_initialized()  # it is not ours to destroy


REFUSED: list[tuple[dict[str, Any], dict[str, str], type[Exception], str]] = [
    ({"backend": "nccl"}, {}, UserError, "backend='nccl' needs a GPU"),
    ({"backend": "nccl", "device": "cpu"}, {}, UserError, "nccl"),
    (
        {"backend": "ucc"},
        {},
        UserError,
        "'ucc'; it must be one of 'auto', 'gloo', 'nccl', 'mpi'",
    ),
    (
        {"backend": "mpi"},
        {},
        UserError,
        "no MPI built in and mpi4py is not installed: pip install mpi4py mpich",
    ),
    ({"device": "cuda"}, {}, UserError, "device='cuda' needs a GPU"),
    ({"device": "tpu"}, {}, UserError, "device='tpu' must be"),
    ({"timeout": 0}, {}, UserError, "timeout=0 must be"),
    ({"timeout": "10"}, {}, UserError, "timeout='10' must be"),
    ({"rank": 1}, {}, UserError, r"init\(rank=1\) without world_size="),
    ({"world_size": 2}, {}, UserError, r"init\(world_size=2\) without rank="),
    (
        {"rank": 2, "world_size": 2, "init_method": "tcp://h:1"},
        {},
        WorldError,
        "rank=2, but it must be between 0 and 1",
    ),
    ({"rank": 0, "world_size": 2}, {}, UserError, "does not say where to meet"),
    (
        {"rank": 0, "world_size": 4},
        {"WORLD_SIZE": "2", "RANK": "0"},
        WorldError,
        r"world_size=4\) contradicts WORLD_SIZE=2",
    ),
    ({"local_rank": 1}, {}, UserError, "this process is alone"),
    (
        {"local_rank": 1},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        WorldError,
        "local_rank=1.*local_rank=0",
    ),
    ({"init_method": "env://"}, {}, UserError, "needs RANK and WORLD_SIZE in the environment"),
    (
        {"init_method": "env://"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        UserError,
        "MASTER_ADDR and MASTER_PORT are not",
    ),
    ({"init_method": "tcp://h:1"}, {}, UserError, "needs rank= and world_size="),
    ({"init_method": "tcp://h"}, {}, UserError, "must be tcp://HOST:PORT"),
    ({"init_method": "tcp://h:99999"}, {}, UserError, "must be tcp://HOST:PORT"),
    ({"init_method": "tcp://h:1?rank=x"}, {}, UserError, "rank=x is none of"),
    (
        {"init_method": "tcp://h:1?rank=0", "rank": 1, "world_size": 2},
        {},
        WorldError,
        "rank=1.*rank=0",
    ),
    (
        {"init_method": "file://relative", "rank": 0, "world_size": 1},
        {},
        UserError,
        "three slashes",
    ),
    (
        {"init_method": "file:///no/such/folder/f", "rank": 0, "world_size": 1},
        {},
        UserError,
        "the folder /no/such/folder",
    ),
    ({"init_method": "http://h:1"}, {}, UserError, "must be 'env://', 'tcp://HOST:PORT' or"),
]


@pytest.mark.parametrize(("asked", "variables", "kind", "message"), REFUSED)
def test_refuses(
    asked: dict[str, Any],
    variables: dict[str, str],
    kind: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kind, match=message):
        allhands.init(**{"timeout": 5, **asked})
    assert allhands.current_world() is None


def member(rank: int, host: str = "a", **known: Any) -> membership.Member:
    return membership.Member(
        rank=rank,
        world_size=4,
        host=host,
        name=host,
        **{"backend": "nccl", "device": "cuda", **known},
    )


def test_places_are_counted_over_hosts_when_nobody_tells_them() -> None:
    members = [member(0, "b"), member(1, "a"), member(2, "b"), member(3, "a")]
    assert [membership.place_of(members, rank) for rank in range(4)] == [
        (0, 2, 0),
        (0, 2, 1),
        (1, 2, 0),
        (1, 2, 1),
    ]


def test_more_workers_than_gpus() -> None:
    membership.check_places([member(rank, gpus=4) for rank in range(4)])
    with pytest.raises(UserError, match=r"4 workers on a but 2 GPUs.*workers=2.*device='cpu'"):
        membership.check_places([member(rank, gpus=2) for rank in range(4)])


def test_one_visible_gpu_each_must_differ() -> None:
    membership.check_places([member(rank, gpus=1, gpu=f"uuid {rank}") for rank in range(4)])
    with pytest.raises(UserError, match="4 workers on a but 1 GPU that"):
        membership.check_places([member(rank, gpus=1, gpu="uuid") for rank in range(4)])
    membership.check_places(
        [member(rank, host=f"host {rank}", gpus=1, gpu="uuid") for rank in range(4)]
    )


def test_ranks_that_choose_different_backends_are_told_what_each_sees() -> None:
    message = membership._contradiction(
        [member(0, gpus=2), member(1, "b", backend="gloo", device="cpu")]
    )
    assert message is not None
    assert "rank 0 (a) has backend=nccl but rank 1 (b) has backend=gloo" in message
    assert "Rank 0 sees 2 GPUs, rank 1 sees 0" in message


@pytest.mark.parametrize(
    ("numbers", "one_host"),
    [
        ((0, 2, 0, 2, 0, 1), True),
        ((0, 4, 0, 2, 0, 2), False),
        ((0, 4, 0, 2), False),
        ((0, 4), None),
        ((0, 1), True),
    ],
)
def test_one_host(numbers: tuple[int, ...], one_host: bool | None) -> None:
    assert Layout(*numbers).one_host is one_host


def test_interfaces() -> None:
    loopback = interface.interface_with("127.0.0.1")
    assert loopback in {name for _, name in socket.if_nameindex()}
    assert interface.interface_with("127.0.1.1") == loopback  # where Debian puts a host's own name
    assert interface.interface_with("203.0.113.77") is None
    assert interface.address_towards("127.0.0.1") == "127.0.0.1"
    assert interface.address_towards("no-such-host.invalid") is None


def test_the_users_interface_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    allhands.init(init_method=free_method(), rank=0, world_size=1, timeout=20, device="cpu")
    allhands.finalize()
    import os

    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"

"""What the strategy kvstore takes, and what it refuses by name."""

from __future__ import annotations

from typing import Any

import pytest

from allhands import KVStore, UserError
from tests.strategies.kvstore_training import train

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "asynch"}, "must be one of 'sync', 'async', 'ssp'"),
        ({"mode": "async", "servers": 0}, "servers=1"),
        ({"mode": "ssp", "servers": 1}, "staleness=None.*whole number of steps"),
        ({"staleness": 2}, "only mode='ssp'"),
        ({"servers": -1}, "whole number"),
        ({"update": "server"}, "one of 'store', 'worker'"),
        ({"mode": "async", "servers": 1, "update": "worker"}, "leave update out"),
        ({"mode": "async", "servers": 1, "find_unused_parameters": True}, "set mode to 'sync'"),
        ({"compress": True}, "write the name of a codec"),
        ({"compress": "powersgd"}, "which only DDP has; write 'int8'"),
        ({"compress": "fp16", "compression": {"type": "fp16"}}, "leave compression out"),
        ({"compress": {"name": "3bit"}}, "there is no codec '3bit'"),
        ({"compress": {"name": "topk", "keep": 2.0}}, "keep=2.0 of .topk"),
        (
            {"mode": "async", "compress": {"name": "fp16"}},
            "other weights; write compress={'name': 'fp16', 'pull': 'none'}",
        ),
        (
            {"update": "worker", "compress": {"name": "1bit"}},
            "write compress={'name': '1bit', 'pull': 'none'}",
        ),
        (
            {"damping": True},
            r"KVStore\(mode='sync', damping=True\): synchronous steps are never stale; leave "
            r"damping out",
        ),
        (
            {"mode": "ssp", "staleness": 0, "damping": True},
            "staleness=0, damping=True.*leave damping out",
        ),
        ({"mode": "async", "damping": 0.5}, "must be True or False"),
        ({"snapshot_every": 5}, "snapshot_every=… and snapshot_dir=… belong together"),
        (
            {"snapshot_every": 5, "snapshot_dir": "s", "servers": 0},
            "has no servers.*launch -s 1 --server-restarts 3",
        ),
        (
            {"mirror": True, "servers": 0},
            "has no servers.*mirror out.*launch -s 2 --server-restarts 3",
        ),
        ({"mirror": True, "mode": "async"}, "synchronous stores only"),
        (
            {"on_worker_loss": "continue"},
            "set on_worker_loss to 'stop', or train with allhands.kvstore.Trainer",
        ),
        ({"on_worker_loss": "restart"}, "one of 'stop', 'continue'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        KVStore(**settings)


def test_no_servers_for_workers_that_do_not_wait() -> None:
    with pytest.raises(
        UserError, match=r"needs parameter servers; write KVStore\(mode='async', servers=1"
    ):
        train(KVStore("async"), workers=2)
    assert KVStore("async").exact is False
    options = KVStore("ssp", staleness=2, damping=True, snapshot_every=5, snapshot_dir="s").options
    assert options == {
        "on_worker_loss": "stop",
        "staleness": 2,
        "damping": True,
        "snapshot_every": 5,
        "snapshot_dir": "s",
    }
    assert KVStore(compress={"name": "2bit"}).exact is False
    assert KVStore(compress={"name": "none"}).exact
    with pytest.raises(
        UserError, match="starts its own servers once.*launch -s 1 --server-restarts 3"
    ):
        train(KVStore(servers=1, snapshot_every=5, snapshot_dir="s"), workers=2)
    with pytest.raises(UserError, match="has no servers, so that none would come back"):
        KVStore(snapshot_every=5, snapshot_dir="s").check(None)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLHANDS_NUM_SERVERS", "1")
        patch.setenv("ALLHANDS_ON_WORKER_FAILURE", "continue")
        with pytest.raises(
            UserError,
            match="started with --on-worker-failure continue.*write --on-worker-failure stop",
        ):
            KVStore().check(None)  # type: ignore[arg-type]
    assert KVStore("ssp", staleness=0).exact


def test_the_old_name_of_compress_warns() -> None:
    with pytest.warns(FutureWarning) as told:
        assert (
            KVStore(compression={"type": "topk", "ratio": 0.1}).compress
            == KVStore(compress={"name": "topk", "keep": 0.1}).compress
        )
    said = " ".join(str(one.message) for one in told)
    assert "write KVStore(compress=…)" in said
    assert "write 'keep'" in said

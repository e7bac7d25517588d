"""Flower's commands: found, of the right release, and with ours in their place."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from allhands.errors import UserError
from allhands.federated.sites import flower, flower_compat


def test_another_release_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(flower, "version", lambda name: "1.43.0")
    with pytest.raises(
        UserError, match=r"flwr 1\.43\.0 is installed.*pip install 'allhands\[flower\]'"
    ):
        flower.require()
    monkeypatch.setattr(flower, "version", lambda name: "1.42.7")
    assert flower.require() == "1.42.7"


def test_flower_that_is_not_there_is_told_how_to_get_it(monkeypatch):
    def absent(name):
        raise flower.PackageNotFoundError(name)

    monkeypatch.setattr(flower, "version", absent)
    with pytest.raises(UserError, match="not installed here: pip install"):
        flower.require()
    with pytest.raises(UserError, match="there is no command flower-nothing"):
        flower.command("flower-nothing")


def test_every_task_of_flower_runs_our_module_or_nothing(tmp_path):
    pytest.importorskip("flwr")
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    place = flower.write_commands(tmp_path / "it's here", {"flwr-clientapp": "json.tool"})
    # A kind of task that a release adds must not find Flower's own command.
    assert (
        {path.name for path in place.iterdir()}
        == set(TASK_TYPE_TO_COMMAND.values())
        == set(flower.TASKS)
    )
    ours = subprocess.run([place / "flwr-clientapp"], input="[1]", capture_output=True, text=True)
    assert ours.stdout.split() == ["[", "1", "]"]
    other = subprocess.run(
        [place / "flwr-serverapp", "--token", "x"], capture_output=True, text=True
    )
    assert (other.returncode, other.stdout, other.stderr) == (
        1,
        "",
        "flwr-serverapp: allhands runs no such task\n",
    )


def test_the_environment_keeps_flower_to_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_SUPERGRID_API_URL", "http://elsewhere")
    monkeypatch.setenv("NO_PROXY", "example.org")
    made = flower.environment(tmp_path, EXTRA="1")
    assert made["PATH"].split(":")[0] == str(tmp_path / "bin")
    assert made["FLWR_HOME"] == str(tmp_path / "flower")
    assert made["FLWR_TELEMETRY_ENABLED"] == "0"
    assert made["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert "FLWR_SUPERGRID_API_URL" not in made
    assert made["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert made["EXTRA"] == "1"
    assert str(sys.executable).startswith(made["PATH"].split(":")[1])


def test_a_piece_that_is_not_there_yet_is_asked_for_again_at_once(monkeypatch):
    pytest.importorskip("flwr")
    from flwr.supercore.inflatable import inflatable_utils

    before = [
        (getattr(inflatable_utils, name), dict(getattr(inflatable_utils, name).__kwdefaults__))
        for name in flower_compat.PULLS.names
    ]
    waits = []

    class Stop(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            return True

    asked = iter([None, None, b"piece"])

    def pull(name):
        piece = next(asked)
        if piece is None:
            raise inflatable_utils.ObjectUnavailableError(name)
        return piece

    try:
        flower_compat.retry_soon()
        flower_compat.retry_soon()
        monkeypatch.setattr(
            inflatable_utils,
            "threading",
            SimpleNamespace(Lock=threading.Lock, Event=Stop),
        )
        assert inflatable_utils.pull_objects(["a"], pull) == {"a": b"piece"}
        assert len(waits) == 2
        assert max(waits) <= 0.12
        monkeypatch.setattr(inflatable_utils, "pull_objects", lambda given: None)
        with pytest.raises(UserError, match="this Flower's pull_objects has no initial_backoff"):
            flower_compat.retry_soon()
        monkeypatch.delattr(inflatable_utils, "pull_objects")
        with pytest.raises(UserError, match="inflatable_utils has no pull_objects"):
            flower_compat.retry_soon()
    finally:
        for function, options in before:
            function.__kwdefaults__.update(options)

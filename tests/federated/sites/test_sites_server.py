"""Real Flower on loopback: a server and three sites as an operator starts them, and what became of
the weights."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import allhands
from tests.examples.running import program
from tests.patience import patience

pytestmark = [pytest.mark.serial, pytest.mark.slow, pytest.mark.usefixtures("forked_python")]

PAGE = (Path(__file__).parents[3] / "docs" / "federated_sites.md").read_text(encoding="utf-8")
NAMES, SIZES = ("north", "east", "south"), (10, 26, 18)


def shown(language: str) -> list[str]:
    """The blocks of a language in the operator's guide."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def words(verb: str, **changes: str) -> list[str]:
    """The arguments after `allhands federated` of the guide's command, with some words of it
    changed."""
    (line,) = (block for block in shown("sh") if block.startswith(f"allhands federated {verb} "))
    for old, new in {"fl.example.org": "127.0.0.1", "0.0.0.0": "127.0.0.1", **changes}.items():
        line = re.sub(rf"\b{re.escape(old)}\b", new, line)
    return line.split()[2:]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as after `allhands federated certificates`: run file, keys, and each site's rows."""
    ((run_file,), (own,)) = shown("yaml"), shown("python")
    (tmp_path / "own.py").write_text(own)
    (tmp_path / "run.yml").write_text(f"{run_file}device: cpu\n")
    random = np.random.default_rng(1)
    for name, size in zip(NAMES, SIZES, strict=True):
        (tmp_path / name).mkdir()
        x = random.standard_normal((size, 6), dtype=np.float32)
        np.savez(
            tmp_path / name / "own.npz", x=x, y=(x.sum(1) > 0).astype(np.int64) + (x[:, 0] > 0.5)
        )
    done = command(tmp_path, *words("certificates"))
    assert done.returncode == 0, done.stderr
    return tmp_path


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`allhands federated …`, to its end."""
    return subprocess.run(
        [program("allhands"), "federated", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def sites(folder: Path, port: int):
    """All three sites; they end with the context, at the first signal."""
    started = []
    for name in NAMES:
        with (folder / f"{name}.log").open("w") as log:
            given = [
                program("allhands"),
                "federated",
                *words("site", north=name, **{"8000": str(port)}),
            ]
            started.append(
                subprocess.Popen(
                    given,
                    cwd=folder,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
    try:
        yield
        for site in started:
            assert site.poll() is None
            site.send_signal(signal.SIGTERM)
        assert [site.wait(patience(30)) for site in started] == [143] * len(NAMES)
    finally:
        for site in started:
            site.kill()
            site.wait()


def simulated(folder: Path) -> dict[str, torch.Tensor]:
    """The weights after the same rounds in one place, by the guide's command."""
    done = command(folder, *words("simulate"))
    assert done.returncode == 0, done.stderr
    found = allhands.load_checkpoint(folder / "logs" / "simulated" / "checkpoints" / "last")
    weights: dict[str, torch.Tensor] = found["model"]
    return weights


def test_plans_say_what_would_run_and_start_nothing(folder: Path, port: int) -> None:
    server = command(folder, *words("server", **{"8000": str(port)}), "--plan")
    site = command(folder, *words("site", **{"8000": str(port)}), "--plan")
    assert server.returncode == site.returncode == 0, server.stderr + site.stderr
    fingerprints = set(re.findall(r"SHA256:\S+", server.stdout))
    assert len(fingerprints) == len(NAMES)
    assert set(re.findall(r"SHA256:\S+", site.stdout)) < fingerprints
    for text in (
        "flower-superexec --runtime-api-address",
        f"127.0.0.1:{port}  sites connect here (TLS; sites prove their keys)",
        str(folder / "keys" / "server.crt"),
        str(folder / "logs" / "events.jsonl"),
        "A site sends:",
    ):
        assert text in server.stdout
    for text in (
        f"to 127.0.0.1:{port} (TLS)",
        "--auth-supernode-private-key",
        str(folder / "north"),
        "This site sends:",
    ):
        assert text in site.stdout
    assert not (folder / "logs").exists()


@pytest.mark.timeout(600)
@pytest.mark.rare
def test_weights_are_the_simulations_to_the_bit_though_the_server_stops_between(
    folder: Path, port: int
) -> None:
    expected = simulated(folder)
    given = words("server", **{"8000": str(port)})
    with sites(folder, port):
        with (folder / "first.log").open("w") as log:
            first = subprocess.Popen(
                [program("allhands"), "federated", *given],
                cwd=folder,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            deadline = time.monotonic() + patience(300)
            while not ends(folder) and first.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            first.send_signal(signal.SIGTERM)
            assert first.wait(patience(60)) == 143, logs(folder)
        finally:
            first.kill()
            first.wait()
        done = command(folder, *given, "resume=auto")
    assert done.returncode == 0, (done.stdout, done.stderr, logs(folder))
    found = allhands.load_checkpoint(folder / "logs" / "checkpoints" / "last")["model"]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert [(event["round"], sorted(event["brought"])) for event in ends(folder)] == [
        (0, sorted(NAMES)),
        (1, sorted(NAMES)),
    ]
    assert "finished" in done.stdout
    assert all(f"{name} " in done.stdout for name in NAMES)
    # Nothing is left of what Flower has started.
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(folder) in _command_line(pid)]


def ends(folder: Path) -> list[dict[str, Any]]:
    """The events of rounds that have ended."""
    path = folder / "logs" / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["kind"] == "round_end"]


def logs(folder: Path) -> dict[str, str]:
    """What the commands printed."""
    return {
        path.name: path.read_text()
        for path in [*folder.glob("*.log"), *folder.glob("logs/server/serverapp.log")]
    }


def _command_line(pid: Path) -> str:
    try:
        return (pid / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""

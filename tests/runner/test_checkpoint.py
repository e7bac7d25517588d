from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import allhands
from allhands import UserError
from allhands.loop import checkpoint
from allhands.loop.checkpoint import storage
from allhands.loop.checkpoint.files import CHECKSUMS
from tests.runner.problems import fit


def write(folder: Path, epoch: int, best: bool = False, value: float = 0.0) -> Path:
    return checkpoint.save(
        folder, {"weights": torch.full((4,), value), "epoch": epoch}, {"epoch": epoch}, best
    )


def test_last_and_best_point_at_whole_checkpoints(tmp_path: Path) -> None:
    for epoch in range(1, 7):
        write(tmp_path, epoch, best=epoch == 2, value=float(epoch))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best",
        "epoch-0002",
        "epoch-0005",
        "epoch-0006",
        "last",
    ]
    assert checkpoint.load(tmp_path / "best")["weights"].tolist() == [2.0] * 4
    assert checkpoint.load(tmp_path / "last")["epoch"] == 6
    assert torch.load(tmp_path / "last" / "state.pt", weights_only=True)["epoch"] == 6


def test_the_same_epoch_can_be_written_again(tmp_path: Path) -> None:
    write(tmp_path, 1, value=1.0)
    write(tmp_path, 1, value=2.0)
    assert checkpoint.load(tmp_path / "epoch-0001")["weights"].tolist() == [2.0] * 4


@pytest.mark.parametrize("how", ["folder", "state file", "checkpoints", "logdir"])
def test_a_checkpoint_is_found_from_any_of_its_paths(tmp_path: Path, how: str) -> None:
    write(tmp_path / "checkpoints", 3)
    paths = {
        "folder": tmp_path / "checkpoints" / "epoch-0003",
        "state file": tmp_path / "checkpoints" / "last" / "state.pt",
        "checkpoints": tmp_path / "checkpoints",
        "logdir": tmp_path,
    }
    assert checkpoint.load(paths[how])["epoch"] == 3


def damage_cut(folder: Path) -> None:
    with (folder / "state.pt").open("r+b") as file:
        file.truncate(100)


def damage_flip(folder: Path) -> None:
    data = bytearray((folder / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "state.pt").write_bytes(data)


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def damage_missing(folder: Path) -> None:
    (folder / "state.pt").unlink()


DAMAGES = [
    (damage_cut, "state.pt has 100 bytes and should have"),
    (damage_flip, "state.pt does not match its checksum"),
    (damage_manifest, "manifest.json cannot be read"),
    (damage_missing, "state.pt is missing"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_is_refused_by_file_name_and_the_one_before_is_used(
    tmp_path: Path, damage: Any, message: str
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    damage(tmp_path / "epoch-0002")
    with pytest.raises(UserError, match=f"{message}.*others there: epoch-0001"):
        checkpoint.load(tmp_path / "last")
    found = checkpoint.newest(tmp_path)
    assert found is not None
    path, state, passed_over = found
    assert (path.name, state["epoch"]) == ("epoch-0001", 1)
    assert message in passed_over[0]


def test_when_all_are_damaged_that_is_said(tmp_path: Path) -> None:
    write(tmp_path, 1)
    damage_cut(tmp_path / "epoch-0001")
    with pytest.raises(UserError, match="no checkpoint in .* can be used"):
        checkpoint.newest(tmp_path)


def test_a_missing_checkpoint_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint at .*nowhere"):
        checkpoint.load(tmp_path / "nowhere")
    assert checkpoint.newest(tmp_path / "nowhere") is None


class Own:
    pass


@pytest.mark.parametrize("value", [Own(), np.float64(1.0), np.zeros(2), lambda: 0])
def test_what_could_not_be_read_back_safely_is_refused_before_writing(
    tmp_path: Path, value: Any
) -> None:
    write(tmp_path, 1)
    with pytest.raises(UserError, match=r"callbacks/0/x is a .*cannot store safely"):
        checkpoint.save(tmp_path, {"callbacks": [{"x": value}]}, {"epoch": 2}, False)
    assert checkpoint.load(tmp_path / "last")["epoch"] == 1


def test_a_full_disk_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "sync", fail)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2)
    assert checkpoint.load(tmp_path / "last")["epoch"] == 1
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_is_named_by_a_string_too(tmp_path, monkeypatch):
    fit(logdir=tmp_path / "logs", num_epochs=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    newest = allhands.load_checkpoint(tmp_path / "logs")["step"]
    for name in (
        "logs",
        "logs/checkpoints",
        "logs/last",
        "logs/checkpoints/last",
        "~/logs",
        "logs/epoch-0002",
        "logs/checkpoints/last/state.pt",
    ):
        assert allhands.load_checkpoint(name)["step"] == newest, name
    assert (
        allhands.load_checkpoint("logs/best")["epoch"]
        == allhands.load_checkpoint("logs")["best_epoch"]
    )
    for wrong, right in (
        ("logs/checkpoints/bset", r"did you mean logs/checkpoints/best\?"),
        ("logs/lasst", r"did you mean logs/checkpoints/last\?"),
        ("log/best", r"no folder log; did you mean logs\?"),
        ("logs/checkpoints/epoch-0009", r"did you mean logs/checkpoints/epoch-000"),
        (3, "named by a path, and this is a int"),
    ):
        with pytest.raises(UserError, match=right):
            allhands.load_checkpoint(wrong)


@pytest.mark.parametrize("kind", sorted(CHECKSUMS))
def test_any_known_checksum_is_written_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(storage, "fastest_checksum", lambda: kind)
    state = {"weights": torch.randn(100_000), "epoch": 1}
    checkpoint.save(tmp_path, state, {"epoch": 1}, False)
    path = tmp_path / "epoch-0001"
    entries = json.loads((path / "manifest.json").read_text())["files"]
    assert {*itertools.chain(*entries.values())} == {kind, "bytes"}
    assert not list(path.glob("*.sum"))
    assert checkpoint.load(path)["epoch"] == 1
    tensors = next(path.glob("*.distcp"))
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(UserError, match="does not match its checksum"):
        checkpoint.load(path)


def test_a_file_without_a_known_checksum_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    manifest = tmp_path / "epoch-0001" / "manifest.json"
    found = json.loads(manifest.read_text())
    found["files"] = {name: {"bytes": one["bytes"]} for name, one in found["files"].items()}
    manifest.write_text(json.dumps(found))
    with pytest.raises(UserError, match=r"manifest.json cannot be read \('crc32'\)"):
        checkpoint.load(tmp_path / "epoch-0001")

"""`allhands export`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from allhands import AveragedWeights
from allhands.cli.main import run
from tests.runner.problems import fit


@pytest.fixture
def trained(tmp_path: Path) -> tuple[nn.Module, Path]:
    model, _ = fit(logdir=tmp_path / "logs", num_epochs=2)
    return model, tmp_path / "logs"


@pytest.mark.parametrize(
    "which",
    ["", "checkpoints", "checkpoints/last", "checkpoints/epoch-0002", "checkpoints/last/state.pt"],
)
def test_the_weights_load_without_allhands(
    trained: tuple[nn.Module, Path], which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, logdir = trained
    output = logdir / "weights.safetensors"
    assert run(["export", str(logdir / which), "-o", str(output)]) == 0
    assert (
        "4 tensors with 164 numbers, from epoch-0002 (epoch 2, optimizer step 14)"
        in capsys.readouterr().out
    )
    weights = load_file(output)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_an_average_of_the_weights_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logdir, output = tmp_path / "logs", tmp_path / "average"
    model, _ = fit(logdir=logdir, num_epochs=2, callbacks=[AveragedWeights(0.5)])
    assert run(["export", str(logdir), "-o", str(output), "--averaged"]) == 0
    weights = load_file(output)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert run(["export", str(logdir), "-o", str(output), "--force"]) == 0
    assert not torch.equal(load_file(output)["0.weight"], weights["0.weight"])
    fit(logdir=logdir, num_epochs=1)
    assert run(["export", str(logdir), "-o", str(output), "--averaged", "--force"]) == 2
    assert "callbacks=[allhands.AveragedWeights()]" in capsys.readouterr().err


def test_a_file_is_not_overwritten_unasked(
    trained: tuple[nn.Module, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, logdir = trained
    output = logdir / "mine"
    output.write_text("precious")
    assert run(["export", str(logdir), "-o", str(output)]) == 2
    assert "add --force to replace it" in capsys.readouterr().err
    assert output.read_text() == "precious"
    assert run(["export", str(logdir), "-o", str(output), "--force"]) == 0
    assert len(load_file(output)) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "-o", "w"], "there is no checkpoint at nowhere"),
        (["logs"], "Missing option '--output'"),
        (["logs", "-o", "."], "is a folder; write -o weights.safetensors"),
        (["logs", "-o", "none/w"], "there is no folder"),
    ],
)
def test_what_cannot_be_done_is_said(
    trained: tuple[nn.Module, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(trained[1].parent)
    assert run(["export", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_by_file_name(
    trained: tuple[nn.Module, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, logdir = trained
    path = logdir / "checkpoints" / "last" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert run(["export", str(logdir / "checkpoints" / "last"), "-o", str(logdir / "w")]) == 2
    assert (
        "__0_0.distcp does not match its checksum: it is damaged; others there: epoch-0001"
        in capsys.readouterr().err
    )
    assert not (logdir / "w").exists()

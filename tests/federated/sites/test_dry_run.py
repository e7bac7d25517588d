"""A site's dry run: what it shows, and that it is what a real round sends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from allhands.cli import main
from allhands.cli.run_training import definition
from allhands.config import read_run

pytest.importorskip("flwr")
from allhands.federated.sites.dry_run import try_site
from tests.federated.sites import three_sites

pytestmark = pytest.mark.usefixtures("quick")
SITE = ["federated", "site", "-C", "run.yml", "--server", "127.0.0.1:9", "--insecure"]
NORTH = [*SITE, "--data", "data/north", "--name", "north", "--dry-run"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    three_sites.write(tmp_path)


def tried(*changes: str, name: str = "north"):
    made = definition(read_run([Path("run.yml")], [f"data.root=data/{name}", *changes]))
    return try_site(made, name, Path("data", name))


def test_it_says_what_would_leave_and_leaves_nothing(capsys):
    assert main.run(NORTH) == 0
    text = capsys.readouterr().out
    for line in (
        "Dry run of north: nothing was sent, and no server was asked.",
        "to train on 10 samples; one is [6] float32, [] int64",
        "to test     4 samples; one is [6] float32, [] int64",
        "its name, north; samples 10, tests 4",
        "Leaves this site after each round, of 6 steps:",
        "layers.0.bias    [9]     stays here; zeros in its place",
        "and the numbers samples 10, steps 3, loss",
        "it is not clipped; the norm of this one is",
    ):
        assert line in text
    assert re.search(r"update +\[\d+\] +float32 +[\d,]+\n", text)
    assert re.search(r"evaluation:\n  count 4, loss \S+, classed 4, right \d, seconds", text)
    left = {path.name for path in Path().iterdir()} - {"__pycache__"}
    assert left == {"run.yml", "own.py", "data"}


def test_numbers_are_those_of_the_reply():
    found = tried()
    assert found.greeting == {"samples": 10.0, "tests": 4.0}
    ((name, shape, kind, size),) = found.arrays
    assert (name, kind) == ("update", "float32")
    assert (
        size
        >= 4 * shape[0]
        >= 4 * sum(one * (two[0] if two else 1) for _, (one, *two), _ in found.tensors)
    )
    assert [(name, leaves) for name, _, leaves in found.tensors] == [
        ("layers.0.weight", True),
        ("layers.0.bias", False),
        ("layers.1.weight", True),
        ("layers.1.bias", True),
    ]
    assert set(found.figures) == {"samples", "steps", "loss", "seconds"}
    assert set(found.measured) == {"count", "loss", "classed", "right", "seconds"}


def test_a_site_without_tests_measures_nothing():
    found = tried(name="east")
    assert found.measured == {}
    assert "none: this site measures nothing" in found.text
    assert "evaluation" not in found.text


def test_clipping_noise_and_compression_are_told():
    pytest.importorskip("dp_accounting")
    whole = ["strategy.local_layers=[]"]
    privacy = "strategy.privacy={clip: 0.01, noise_multiplier: 2.0, delta: 0.01}"
    text = tried(*whole, privacy, "strategy.algorithm={name: fedavg, weighted: false}").text
    assert "it is clipped to a norm of 0.01; this one has 0.01" in text
    assert "noise of 2 x 0.01 is added to the sum by the server, not here" in text
    narrow = tried(*whole, "strategy.compress={name: topk, keep: 0.02}")
    assert {name for name, *_ in narrow.arrays} == {"update.places", "update.values"}
    assert "it is compressed (compress: topk)" in narrow.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--name", "west"], "--name west is none of strategy.sites.names"),
        (["model.in_features=5"], "this site would be left out: RuntimeError: mat1 and mat2"),
        (["model.out_features=1"], "this site would be left out"),
        (["strategy.sites.labels=[a, b]"], "a sample here is of class 2, and the server names 2"),
        (["--plan"], "write one of them"),
        (["data.name=own.py:lod"], "lod"),
    ],
    ids=str,
)
def test_what_would_keep_the_site_out_is_told(changes, message, capsys):
    assert main.run([*NORTH, *changes]) == 2
    assert message in capsys.readouterr().err
    assert not Path("logs").exists()

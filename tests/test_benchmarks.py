"""The benchmarks: tables of the documentation are what the committed results make, and the script
for GPUs works."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = {
    "gpus": ["NVIDIA X", "NVIDIA X"],
    "cores": 4,
    "cpu": "",
    "python": "3.12.3",
    "date": "2026-01-01",
    "versions": {"torch": "2.11"},
}


def check(results: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/tables.py", "--check", "--results", str(results)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script by its name; the names are free again afterwards."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    yield importlib.import_module
    for path in (ROOT / "benchmarks").glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


@pytest.fixture
def tables(scripts):
    return scripts("tables")


def write(folder: Path, name: str, cases: list[dict]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"machine": MACHINE, "cases": cases}))


def case(task: str, workers: int, **contenders: dict) -> dict:
    return {
        "task": task,
        "workers": workers,
        "contenders": {name.replace("_", "-"): row for name, row in contenders.items()},
    }


def test_the_tables_are_what_the_results_make(tmp_path):
    done = check(RESULTS)
    assert done.returncode == 0, done.stderr
    changed = shutil.copytree(RESULTS, tmp_path / "results")
    launch = json.loads((changed / "launch.json").read_text())
    launch["ratio"]["allhands"] /= 2
    (changed / "launch.json").write_text(json.dumps(launch))
    done = check(changed)
    assert done.returncode == 1
    assert "README.md, docs/benchmarks.md; run python benchmarks/tables.py" in done.stderr


def test_both_pages_have_tables(tables):
    for page in tables.PAGES:
        assert tables.MARKED.findall((ROOT / page).read_text()), page


def test_what_was_not_measured_is_not_shown(tables, tmp_path):
    base, graph = (
        {"microseconds": 1000.0, "ratio": 1.0},
        {"microseconds": 50.0, "ratio": 20.0, "gib": 1.0},
    )
    eager, failed = {"microseconds": 500.0, "ratio": 2.0}, {"failed": "UserError: no"}
    write(
        tmp_path,
        "gpu_workers",
        [
            case(
                "regression",
                2,
                ddp={**base, "efficiency": 0.5},
                allhands_graph=failed,
                allhands_eager=eager,
            ),
            case("regression", 1, ddp=base, allhands_graph=graph),
        ],
    )
    assert tables.readme(tmp_path).splitlines() == [
        "| | where | by hand | allhands |",
        "| --- | --- | --- | --- |",
        "| linear regression, batch 32 | 1 x NVIDIA X | 1.00 | 20.00 |",
        # what step="auto" does where nothing is recorded
        "| linear regression, batch 32 | 2 x NVIDIA X | 1.00 | 2.00 |",
    ]
    page = tables.gpu(tmp_path)
    assert "| linear regression, batch 32, 1 GPU | 1,000 (1.00) | | 50 (20.00) |" in page
    assert "| linear regression, batch 32, 2 GPUs | 0.50 |" in page
    assert "| linear regression, batch 32, 2 GPUs | allhands, captured | UserError: no |" in page
    assert "Lightning" not in page.split("\n\n", 1)[1]


def test_a_case_in_two_files_of_one_machine_is_refused(tables, tmp_path):
    for name in ("gpu_workers", "gpu_workers_again"):
        write(tmp_path, name, [case("gpt-124M", 1, ddp={"microseconds": 1.0, "ratio": 1.0})])
    with pytest.raises(
        SystemExit,
        match="gpu_workers_again.json: another file of the same machine also has GPT-124M",
    ):
        tables.readme(tmp_path)


def test_ratios_are_of_the_same_turn_and_efficiency_of_the_same_contender(scripts):
    script = scripts("gpu_workers")
    results = script.Results(argparse.Namespace(device="cuda", name=None, quick=True))
    for workers, figures in (
        (1, {"ddp": [100.0, 200.0], "lightning": [200.0, 100.0]}),
        (2, {"ddp": [160.0], "lightning": [400.0]}),
    ):
        for contender, values in figures.items():
            for turn, value in enumerate(values):
                results.add(
                    workers,
                    ("regression", turn, contender),
                    {"microseconds": value, "said": [], "wall": 0.0},
                )
    results.add(
        2, ("regression", 0, "accelerate"), {"failed": "RuntimeError: out of memory", "said": []}
    )
    one, two = (case["contenders"] for case in results.cases())
    assert one["lightning"]["ratio"] == (100 / 200 + 200 / 100) / 2
    assert "efficiency" not in one["ddp"]
    assert (two["ddp"]["efficiency"], two["lightning"]["efficiency"]) == (150 / 160, 150 / 400)
    assert two["lightning"]["ratio"] == 160 / 400
    assert two["accelerate"] == {"failed": "RuntimeError: out of memory"}
    assert results.has_failed(2, "regression", "accelerate")
    assert not results.has_failed(1, "regression", "accelerate")


def test_a_turn_takes_as_long_as_its_slowest_rank(scripts):
    ranks = [
        {"seconds": [1.0, 5.0, 2.0], "gib": 1.0, "wall": 9.0, "said": []},
        {"seconds": [3.0, 4.0, 1.0], "gib": 2.0, "wall": 8.0},
    ]
    found = scripts("gpu_workers").slowest(ranks)
    assert (found["microseconds"], found["gib"], found["wall"]) == (3e6, 2.0, 9.0)
    assert (
        scripts("gpu_workers").slowest([ranks[0], {**ranks[1], "failed": "why"}])["failed"] == "why"
    )


# rare: make bench runs it, and no user.
@pytest.mark.rare
@pytest.mark.serial
def test_contenders_take_turns_in_two_workers():
    """Without GPUs a step cannot be recorded: that is said, and the others are measured all the
    same."""
    before = sorted(RESULTS.iterdir())
    command = [
        sys.executable,
        "benchmarks/gpu_workers.py",
        "--device",
        "cpu",
        "--workers",
        "1,2",
        "--quick",
        "--turns",
        "1",
        "--tasks",
        "regression,gpt-124M",
        "--contenders",
        "allhands-eager,allhands-graph",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for task in ("regression", "gpt-124M"):
        shown = re.search(
            rf"^{task}, 2 workers, \d+ each\n((?:  .*\n)+)", done.stdout, re.MULTILINE
        )[1]
        assert re.search(
            r"^  ddp +[\d.]+ us a step +1\.00 x +efficiency [\d.]+$", shown, re.MULTILINE
        ), done.stdout
        assert re.search(
            r"^  allhands-eager +[\d.]+ us a step +[\d.]+ x +efficiency", shown, re.MULTILINE
        ), done.stdout
        assert re.search(r"^  allhands-graph +UserError: step='graph'", shown, re.MULTILINE), (
            done.stdout
        )
    assert sorted(RESULTS.iterdir()) == before


def test_growth_is_told_as_the_power_of_the_size(tables, scripts, tmp_path):
    points = [
        {"size": size, "ms": 0.5 * size, "MB": 200.0, "ms of all pairs": size**2 / 1e6}
        for size in (10, 100_000, 1_000_000)
    ]
    (tmp_path / "growth.json").write_text(
        json.dumps({"axes": {"keys": points}, "machine": {**MACHINE, "gpus": []}})
    )
    page = tables.TABLES["growth"](tmp_path)
    assert "| keys | 10 | 100,000 | 1 M | n^x at the end |" in page
    assert "| ms | 5.00 | 50,000 | 500,000 | 1.00 |" in page
    assert "| MB | 200 | 200 | 200 | 0.00 |" in page
    assert re.search(r"ms of all pairs .* 2\.00 \|", page)
    drawn = scripts("pictures").draw(tmp_path, tmp_path)
    assert drawn == ["growth.png"]
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_a_point_of_growth_is_measured(scripts):
    found = scripts("growth").AXES["stored"][0](10_000)
    assert found["ms a checkpoint"] > 0


def test_instructions_stand_beside_seconds(tables, tmp_path):
    results = json.loads((RESULTS / "step_overhead_1.json").read_text())
    counted = {"step": 1_000_000, "training": 2_000_000}
    results["instructions"] = {
        "of": {"by hand": counted, "allhands": {"step": 500_000, "training": 90_000_000}}
    }
    (tmp_path / "step_overhead_1.json").write_text(json.dumps(results))
    page = tables.TABLES["step"](tmp_path)
    assert "| thousand instructions a step | 1,000 (1.00) | 500 (2.00) | | |" in page
    assert "| million instructions of a training beside its steps | 2 | 90 | | |" in page

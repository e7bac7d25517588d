"""The examples with libraries: each is a script, and trains on three workers what it trains in one
process."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.running import EXAMPLES, example_module
from tests.worlds import in_world

SAMPLES, GLOBAL = 53, 12  # neither divides the other
#: By example: what it imports, with what it is called as a script.
LIBRARIES = {
    "transformers_classifier": ("transformers", []),
    "transformers_gpt": ("transformers", []),
    "hf_datasets": ("datasets", ["--stream"]),
    "web_dataset": ("webdataset", ["--split"]),
    "graphs": ("torch_geometric", []),
    "timm_finetune": ("timm", []),
    "torchvision_detection": ("torchvision", []),
}
#: By row: the example, with what its `train` is called, and whether its steps are those of one
#: process. Each rank's own part of a stream makes other batches.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "transformers_classifier": ("transformers_classifier", {}, True),
    "transformers_gpt": ("transformers_gpt", {}, True),
    "hf_datasets": ("hf_datasets", {}, True),
    "hf_datasets, stream": ("hf_datasets", {"stream": True}, True),
    "web_dataset": ("web_dataset", {}, True),
    "web_dataset, split": ("web_dataset", {"split": True}, False),
    "graphs": ("graphs", {}, True),
}


def needs(example: str) -> None:
    """Skip the test where what the example imports is not there, or does not fit this torch."""
    library, _ = LIBRARIES[example]
    try:
        importlib.import_module(library)
    except Exception as error:
        pytest.skip(f"{library} cannot be imported here: {type(error).__name__}: {error}")


@pytest.mark.parametrize("name", LIBRARIES)
def test_it_is_a_script(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs(name)
    samples = "8" if name == "torchvision_detection" else str(SAMPLES)
    monkeypatch.setattr(sys, "argv", [name, "--samples", samples, *LIBRARIES[name][1]])
    runpy.run_path(str(EXAMPLES / "libraries" / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "single, 1 worker" in said
    assert "peak memory" in said  # it has come to the end


def train(row: str, shards: str, workers: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The weights and predictions, and the history."""
    name, given, _ = CASES[row]
    module: Any = example_module(f"libraries/{name}")
    args = (shards,) if name == "web_dataset" else ()
    given = given | ({} if name == "web_dataset" else {"samples": SAMPLES})
    model, history, *further = module.train(*args, GLOBAL // workers, epochs=2, **given)
    return [*(value.detach() for value in model.state_dict().values()), *further], history


def train_all(rows: list[str], shards: str) -> list[Any]:
    return [train(row, shards, torch.distributed.get_world_size()) for row in rows]


@pytest.mark.serial
def test_three_workers_train_what_one_process_trains(tmp_path: Path) -> None:
    missing = set()
    for example, (library, _) in LIBRARIES.items():
        try:
            importlib.import_module(library)
        except Exception:
            missing.add(example)
    rows = [row for row, (example, _, _) in CASES.items() if example not in missing]
    shards = ""
    if "web_dataset" not in missing:
        shards = example_module("libraries/web_dataset").write_shards(tmp_path, 40)
    libraries = {LIBRARIES[CASES[row][0]][0] for row in rows}
    found = in_world(3, train_all, rows, shards, preload=("torchmetrics", *sorted(libraries)))[0]
    for row, (values, history) in zip(rows, found, strict=True):
        alone, expected = train(row, shards, 1)
        if CASES[row][2]:
            for one, other in zip(values, alone, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=row)
            assert history["train"]["loss"] == pytest.approx(expected["train"]["loss"], rel=1e-4)
            for name, value in expected["valid"].items():
                assert history["valid"][name] == pytest.approx(value, rel=1e-3), row
        assert history["valid"].keys() == expected["valid"].keys()


def test_all_of_them_are_tested() -> None:
    found = {path.stem for path in (EXAMPLES / "libraries").glob("*.py")}
    assert found == LIBRARIES.keys()
    page = (EXAMPLES.parent / "docs" / "libraries.md").read_text()
    assert not [name for name in found if f"{name}.py" not in page]

"""`allhands init` and `allhands schema`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allhands.cli.init import ProjectKind
from allhands.cli.schema_file import schema_of_runs
from allhands.config import RunConfig, read_run
from tests.cli.projects import json_of, said
from tests.patience import patience

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.mark.serial
@pytest.mark.parametrize("kind", list(ProjectKind))
def test_a_first_project_trains_and_passes_its_test(kind, tmp_path, capsys):
    text = said(capsys, "init", kind.value, str(tmp_path / "first"))
    assert "run.yml" in text
    assert f"cd {tmp_path / 'first'} && allhands run -C run.yml" in text
    names = {path.name for path in (tmp_path / "first").iterdir()}
    assert names == {"run.yml", "net.py", "samples.py", "test_project.py"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "first",
        capture_output=True,
        text=True,
        timeout=patience(200),
    )
    assert done.returncode == 0, done.stdout


def test_nothing_is_overwritten(tmp_path: Path, capsys):
    (tmp_path / "net.py").write_text("mine")
    text = said(capsys, "init", "rows", str(tmp_path), code=2)
    assert "net.py is there already; name another folder: allhands init rows FOLDER" in text
    assert [path.name for path in tmp_path.iterdir()] == ["net.py"]
    assert "is a file; name a folder" in said(
        capsys, "init", "rows", str(tmp_path / "net.py"), code=2
    )


def test_the_schema_takes_every_run_file_and_refuses_what_is_wrong():
    jsonschema = pytest.importorskip("jsonschema")
    root = Path(__file__).parents[2]
    validator = jsonschema.Draft202012Validator(schema_of_runs())
    validator.check_schema(validator.schema)
    files = [*root.glob("examples/*/*.yml"), *root.glob("src/allhands/cli/templates/*/run.yml.*")]
    assert len(files) > 8
    for path in files:
        written = {key: value for key, value in _values(path).items() if value is not None}
        assert not list(validator.iter_errors(written)), path
    for wrong in (
        {"optimizer": {"name": "adamw", "weight_deca": 1}},
        {"optimizer": {"name": "AdamW", "amsgrad": 1}},
        {"seed": "x"},
        {"sede": 1},
    ):
        assert list(validator.iter_errors(wrong)), wrong
    own = {"metrics": ["accuracy", {"name": "net.py:within", "top": 3}], "loggers": ["a.py:Own"]}
    assert not list(validator.iter_errors(own))


def _values(path: Path) -> dict[str, Any]:
    given, defaults = read_run([path]).config, RunConfig()
    keys = [key for key in RunConfig.model_fields if getattr(given, key) != getattr(defaults, key)]
    return given.model_dump(include=set(keys))


def test_the_schema_has_every_key_name_and_option(capsys):
    made = json_of(capsys, "schema")
    assert made == schema_of_runs()
    assert set(made["properties"]) == set(RunConfig.model_fields)
    names, section = made["$defs"]["Optimizer"]["anyOf"]
    assert {"AdamW", "adamw", "LBFGS", "MuonAdamW"} <= set(names["anyOf"][0]["enum"])
    adamw = next(
        case["then"]
        for case in section["allOf"]
        if "AdamW" in case["if"]["properties"]["name"]["enum"]
    )
    assert adamw["properties"]["amsgrad"] == {"type": "boolean"}
    assert adamw["additionalProperties"] is False
    assert {"name", "lr", "betas", "weight_decay"} <= set(adamw["properties"])
    metrics = made["$defs"]["Metric"]["anyOf"][0]["anyOf"][0]["enum"]
    assert {"accuracy", "MulticlassF1Score", "MeanSquaredError"} <= set(metrics)

"""The generated Flower app: Flower takes it, and it holds the run file and nothing else."""

from __future__ import annotations

import tomllib

import pytest

from allhands.errors import UserError
from allhands.federated.sites import app


def test_flower_builds_it(tmp_path):
    build = pytest.importorskip("flwr.cli.build")
    app.write(tmp_path / "app", "data: digits\n")
    assert len(build.build_fab_from_disk(tmp_path / "app")) < 10_000
    assert (tmp_path / "app" / app.PACKAGE / "run.yml").read_text() == "data: digits\n"


def test_its_components_are_there_and_name_our_modules(tmp_path):
    made = app.files("")
    components = tomllib.loads(made["pyproject.toml"].decode())["tool"]["flwr"]["app"]["components"]
    for side in ("server", "client"):
        assert components[f"{side}app"] == f"{app.PACKAGE}.{side}:app"
        text = made[f"{app.PACKAGE}/{side}.py"].decode()
        compile(text, side, "exec")
        assert f"from allhands.federated.sites.{side}_app import app" in text
        assert app.RUN_FILE in text


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="is not an empty folder"):
        app.write(tmp_path, "")
    with pytest.raises(UserError, match="cannot name a Flower app"):
        app.files("", "My App")

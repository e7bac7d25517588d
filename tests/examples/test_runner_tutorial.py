"""The tutorial's scripts, as they are: each trains 8 epochs, and its body runs once in the process
that was started."""

from __future__ import annotations

import ast

import pytest

from tests.examples.running import EXAMPLES, epochs_in, program, run_in

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

SCRIPTS = {
    "plain": "logdir",
    "stage1": "logs/example_1",
    "stage2": "logs/example_2",
    "stage3": "logs/example_3",
}
EIGHT = [f"{epoch}/8" for epoch in range(1, 9)]

# Counts how often the script is executed, in any process, without a line in it: sitecustomize is
# imported by every Python process before its script, and an audit hook sees each script's code
# object being run.
COUNTER = """
import sys
SCRIPTS = ("plain.py", "stage1.py", "stage2.py", "stage3.py")
def hook(event, args):
    if event == "exec" and getattr(args[0], "co_filename", "").endswith(SCRIPTS):
        if args[0].co_name == "<module>":
            with open({path!r}, "a") as file:
                file.write("run\\n")
sys.addaudithook(hook)
"""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.rare) if name == "stage1" else name for name in SCRIPTS],
)
def test_script_as_it_is(name, tmp_path):
    counted = tmp_path / "runs"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(COUNTER.format(path=str(counted)))
    script = EXAMPLES / "runner_tutorial" / f"{name}.py"
    text = run_in(tmp_path, program("python"), str(script), env={"PYTHONPATH": str(hooks)})
    assert epochs_in(text) == EIGHT, text
    assert counted.read_text().splitlines() == ["run"], "the script's body ran more than once"
    logdir = tmp_path / SCRIPTS[name]
    assert (logdir / "metrics.csv").read_text().count("\n") == 1 + 8
    assert (logdir / "checkpoints" / "last").resolve().name == "epoch-0008"


def test_stage1_under_torchrun(tmp_path):
    script = str(EXAMPLES / "runner_tutorial" / "stage1.py")
    text = run_in(tmp_path, program("torchrun"), "--nproc-per-node", "2", "--standalone", script)
    assert epochs_in(text) == EIGHT, text
    assert "ddp, 2 workers on" in text


# rare: under torchrun it takes the same way, and an own loop runs under allhands launch.
@pytest.mark.rare
def test_stage1_under_allhands_launch(tmp_path):
    script = str(EXAMPLES / "runner_tutorial" / "stage1.py")
    text = run_in(tmp_path, program("allhands"), "launch", "-n", "2", script)
    assert epochs_in(text) == EIGHT, text
    assert "ddp, 2 workers on" in text


def test_scripts_have_no_guard():
    for name in SCRIPTS:
        tree = ast.parse((EXAMPLES / "runner_tutorial" / f"{name}.py").read_text())
        assert not any(
            isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(tree)
        ), name

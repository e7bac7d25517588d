"""Trainings in the kernel of a notebook: a bar and curves in one place, and the stop button."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.serial

BEGIN = """
print("begun")
import os, signal, torch
from torch.utils.data import DataLoader, TensorDataset
from allhands import Callback, SupervisedRunner

os.environ["ALLHANDS_CURVES"] = "1"
torch.manual_seed(0)
x = torch.randn(200, 5)
data = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 20)
model = torch.nn.Linear(5, 2)
runner, kernel = SupervisedRunner(device="cpu"), os.getpid()

class Stop(Callback):
    at = 25
    def __init__(self):
        self.weight, self.steps = None, 0
    def on_step_end(self, training):
        self.weight, self.steps = training.model.weight.detach().clone(), training.step
        if training.step == self.at and training.world.rank == 0:
            os.kill(kernel, signal.SIGINT)

def train(num_epochs, **options):
    return runner.train(
        model=model,
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": data, "valid": data},
        metrics=["accuracy"],
        num_epochs=num_epochs,
        verbose=True,
        **options,
    )
"""
STOPPED = """
print(torch.equal(model.weight, stop.weight), stop.steps, len(runner.last_history["epoch"]))
"""
CELLS = [
    BEGIN,
    "history = train(3)",
    "history",
    "history.plot()",
    "stop = Stop()\ntrain(100_000, callbacks=[stop])",
    STOPPED,
    "stop = Stop()\ntrain(100_000, callbacks=[stop], distributed=True, workers=2)",
    STOPPED,
    "train(2, distributed=True, workers=2)['step']",
]


@pytest.fixture(scope="module")
def outputs() -> list[list[Any]]:
    """What the cells of one notebook show."""
    pytest.importorskip("matplotlib")
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, kernel_name="python3", allow_errors=True).execute()
    return [cell.outputs for cell in notebook.cells]


def printed(outputs: list[Any]) -> str:
    return "".join(output.get("text", "") for output in outputs)


def pictures(outputs: list[Any]) -> list[str]:
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def test_a_training_warns_of_nothing_and_draws_its_curves_in_one_place(outputs: Any) -> None:
    assert printed(outputs[0]) == "begun\n"
    of_training = outputs[1]
    assert {output.get("name") for output in of_training} == {"stdout", None}
    assert "widgets" not in str(of_training)
    assert len(pictures(of_training)) == 1
    # The bar is gone.
    shown = [output.data for output in of_training if output.output_type == "display_data"]
    assert [set(data) for data in shown] == [{"text/plain"}, {"text/plain", "image/png"}]
    assert shown[0]["text/plain"] == ""
    rows = [line for line in printed(of_training).splitlines() if "/3 " in line]
    assert [row.split()[0] for row in rows] == ["1/3", "2/3", "3/3"]


def test_the_history_is_a_table_and_a_figure(outputs: Any) -> None:
    (table,) = outputs[2]
    assert table.data["text/html"].count("<tr>") == 4
    assert table.data["text/plain"].splitlines()[3].split()[:2] == ["3", "30"]
    assert len(pictures(outputs[3])) == 1


@pytest.mark.parametrize("cell", [4, 6], ids=["here", "on workers"])
def test_the_stop_button_keeps_the_last_step(outputs: Any, cell: int) -> None:
    same, steps, rows = printed(outputs[cell + 1]).split()
    assert same == "True"
    assert int(steps) >= 25
    assert f"interrupted after optimizer step {steps}, in epoch {int(rows) + 1}: " in printed(
        outputs[cell]
    )
    (error,) = [output for output in outputs[cell] if output.output_type == "error"]
    assert error.traceback == [
        "KeyboardInterrupt: the training was stopped; runner.last_history has its rows"
    ]


def test_a_training_goes_on_after_it(outputs: Any) -> None:
    (last,) = [output for output in outputs[8] if output.output_type == "execute_result"]
    assert last.data["text/plain"] == "[5, 10]"

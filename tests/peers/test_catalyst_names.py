"""The page with Catalyst's names."""

from __future__ import annotations

from pathlib import Path

import torch

from allhands.catalyst import utils
from tests.peers import catalyst_names


def test_a_page_from_a_folder(tmp_path: Path) -> None:
    """Names that are here, refused and absent; none of the folder's modules is imported."""
    given = {
        "core": "from catalyst.core.callback import Callback, ICallback",
        "runners": "from catalyst.runners.runner import Runner as Runner, _private",
        "callbacks": "from catalyst.callbacks.odd import OddCallback, IS_THERE",
        "callbacks/metrics": "from catalyst.callbacks.metrics.auc import AUCCallback",
        "engines": "from catalyst.step_engines import *",
        "loggers": "if True:\n    from catalyst.loggers.csv import CSVLogger",
        "metrics": "from catalyst.metrics.additive import AdditiveMetric, AUCMetric",
        "utils": "from catalyst.utils.torch import set_requires_grad, any2device",
    }
    for name, text in given.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "__version__.py").write_text("__version__ = '22.4'")
    page = "\n".join(catalyst_names.lines(tmp_path))
    assert "source, 22.4." in page
    for line in (
        "Of 6 names 4 are here, 1 are refused.",
        "| `Callback` | here |  |",
        "| `ICallback` | refused | dl.Callback, or the callback of that kind |",
        "| `OddCallback` | absent |  |",
        "| `AdditiveMetric` | here |  |",
        "| `any2device` | refused | allhands.data.to_device(batch, device) |",
    ):
        assert line in page, page


def test_the_page_has_no_name_that_is_absent() -> None:
    text = catalyst_names.PAGE.read_text()
    assert "| absent |" not in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    module = "dl"
    for line in text.splitlines():
        module = line.removeprefix("## ") if line.startswith("## ") else module
        if line.startswith("| `"):
            name, state = line.split("`")[1], line.split(" | ", 1)[1].removesuffix(" |")
            assert catalyst_names.state_of(module, name) == state, name
    assert len(rows) > 100


def test_parameters_that_need_no_gradient() -> None:
    model = torch.nn.Linear(2, 1)
    before = utils.get_requires_grad(model)
    utils.set_requires_grad(model, False)
    assert not any(utils.get_requires_grad(model).values())
    utils.set_requires_grad(model, {"weight": False, "bias": True})
    assert utils.get_requires_grad(model) == {"weight": False, "bias": True}
    utils.set_requires_grad(model, before)
    assert all(utils.get_requires_grad(model).values())

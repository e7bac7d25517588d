"""A researcher's first hour with a script of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.walks.walking import EXAMPLES, in_order, walk

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.mark.serial
@pytest.mark.slow
def test_researcher(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    text = walk("researcher", tmp_path, str(EXAMPLES))
    in_order(
        text,
        "[0] epoch 9: accuracy 0.9",
        "[0] allhands: ddp, 2 workers on cpu, gloo; global batch 64",
        "[0] 10/10 ",
        "strategy  workers  first differing step",
        "accuracy: valid 0.9",
        "weights.safetensors: 4 tensors with 9,610 numbers, from epoch-0010",
        "0.weight [128, 64]",
    )
    verdicts = re.findall(r"^ddp +([12]) +- .* (\w+)$", text, re.MULTILINE)
    assert verdicts == [("1", "same"), ("2", "same")]
    assert (tmp_path / "weights.safetensors").stat().st_size > 4 * 9610

"""Catalyst's engines are a device and arguments of `train`."""

from __future__ import annotations

from typing import Any

import pytest

from allhands import UserError
from allhands.catalyst import dl
from allhands.catalyst.engines import apply_engine


@pytest.mark.parametrize(
    ("engine", "device", "settings"),
    [
        (dl.CPUEngine, "cpu", {}),
        (lambda: dl.GPUEngine(fp16=True), "cuda", {"precision": "fp16"}),
        (lambda: dl.Engine(mixed_precision="bf16"), None, {"precision": "bf16"}),
        (dl.DataParallelEngine, None, {"distributed": "dp"}),
        (
            lambda: dl.DistributedDataParallelEngine(mixed_precision="no"),
            None,
            {"distributed": True, "precision": "fp32"},
        ),
    ],
)
def test_what_an_engine_stands_for(engine: Any, device: str | None, settings: Any) -> None:
    made = engine()
    assert dl.Runner(engine=made).device == device
    assert dl.SupervisedRunner(engine=made).device == device
    runner, given = dl.Runner(), {"seed": 3}
    apply_engine(runner, made, given)
    assert (runner.device, given) == (device, {"seed": 3, **settings})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dl.Runner(engine=object()), r"dl.CPUEngine\(\)"),
        (lambda: dl.Runner(engine=dl.CPUEngine(), device="cuda"), "leave out one of them"),
        (lambda: dl.CPUEngine(port=5), "CPUEngine.port=a"),
        (lambda: dl.GPUEngine(mixed_precision="fp8"), "it is no, fp16, bf16"),
        (lambda: dl.GPUEngine(fp16=True, mixed_precision="bf16"), "leave out one of them"),
        (
            lambda: apply_engine(dl.Runner(), dl.DataParallelEngine(), {"distributed": "ddp"}),
            "distributed='ddp' and DataParallelEngine",
        ),
    ],
)
def test_what_an_engine_cannot_be_is_refused(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()

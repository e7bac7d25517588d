"""What the caller has set is set in the workers, and what they log reaches its handlers."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from allhands.launch import caller, records, spawn
from tests.worlds import ONE_THREAD, PRELOAD

#: Set by the test; workers import this module anew.
LIMIT = 1


def state() -> dict[str, Any]:
    return {
        "dtype": str(torch.get_default_dtype()),
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        "precision": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.enabled,
        "anomaly": torch.is_anomaly_enabled(),
        "flush": torch.tensor(5e-324, dtype=torch.float64).mul(1).item() == 0,
        "digits": torch._tensor_str.PRINT_OPTS.precision,
        "errors": np.geterr()["over"],
        "recursion": sys.getrecursionlimit(),
        "autocast": str(torch.get_autocast_dtype("cpu"))
        if torch.is_autocast_enabled("cpu")
        else None,
        "filter": [str(one[0]) for one in warnings.filters if one[2] is BytesWarning],
        "limit": LIMIT,
    }


def look() -> dict[str, Any]:
    log = logging.getLogger("of.the.users")
    log.debug("not %s", "shown")
    log.info("rank is %d", 5)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("an error")
    return state()


@pytest.fixture
def other_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = caller._captured()
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 7)
    digits, recursion = torch._tensor_str.PRINT_OPTS.precision, sys.getrecursionlimit()
    with (
        warnings.catch_warnings(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        np.errstate(over="raise"),
    ):
        warnings.filterwarnings("error", category=BytesWarning)
        try:
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
            torch.autograd.set_detect_anomaly(True)
            torch.set_flush_denormal(True)
            torch.set_printoptions(precision=2)
            sys.setrecursionlimit(1234)
            yield
        finally:
            sys.setrecursionlimit(recursion)
            torch.set_printoptions(precision=digits)
            torch.set_flush_denormal(False)
            torch.autograd.set_detect_anomaly(False)
            torch.backends.mkldnn.enabled = before["torch"]["torch.backends.mkldnn.enabled"]
            torch.backends.cudnn.benchmark = False
            torch.set_float32_matmul_precision("highest")
            torch.use_deterministic_algorithms(False)
            torch.set_default_dtype(torch.float32)


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_workers_are_set_as_the_caller_is(
    other_settings: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="of.the.users")
    here = state()
    there = spawn(look, workers=2, env=ONE_THREAD, preload=PRELOAD)
    assert there == [here, here]
    assert here["limit"] == 7
    assert here["flush"]
    heard = [record for record in caplog.records if record.name == "of.the.users"]
    assert sorted(record.getMessage() for record in heard if record.levelno == logging.INFO) == [
        "[0] rank is 5",
        "[1] rank is 5",
    ]
    assert sorted(record.rank for record in heard) == [0, 0, 1, 1]  # type: ignore[attr-defined]
    assert all(
        "ValueError: broken" in str(record.exc_text)
        for record in heard
        if record.levelno == logging.ERROR
    )


def test_a_message_that_is_no_record_is_left_to_others() -> None:
    assert not records.replay(0, {"report": "line"})

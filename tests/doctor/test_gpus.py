"""What is read from nvidia-smi, and said of it."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.doctor.gpus import alike, gpus, read_links, usable
from tests.doctor.facts import SMI, facts


def test_two_healthy_gpus() -> None:
    (one,) = gpus("d1", facts())
    assert one.status == "ok"
    assert one.found == (
        "2 x NVIDIA H200; driver 580.159.04 (CUDA up to 13.0); free memory 143156, 143156 of "
        "143771 MiB; joined by NV18 (NVLink)"
    )
    assert one.values["count"] == 2
    assert one.values["links"] == ["0-1 NV18"]
    assert one.values["free_mib"] == [143156, 143156]


@pytest.mark.parametrize("told", [None, {**SMI, "gpus": "No devices were found\n"}])
def test_none(told: dict[str, str] | None) -> None:
    (one,) = gpus("d1", facts(nvidia_smi=told, versions__CUDA=None))
    assert one.status == "ok"
    assert "CPU training" in one.found
    assert one.values == {"count": 0}


USED = "GPU-7c4560ef, 4211, /usr/bin/python3, 1200\n"


def with_mode(mode: str) -> str:
    return SMI["gpus"].replace("143156, Default", f"143156, {mode}", 1)


@pytest.mark.parametrize(
    ("changes", "status", "found", "advice"),
    [
        (
            {"nvidia_smi__gpus": "Failed to initialize NVML: version mismatch\n"},
            "problem",
            "version mismatch",
            "boot",
        ),
        (
            {"versions__CUDA": None},
            "problem",
            "torch is built without CUDA, beside 2 GPUs",
            "pytorch.org",
        ),
        (
            {"versions__CUDA": "14.1"},
            "problem",
            "CUDA 14.1, but the driver 580.159.04 knows CUDA up to 13.0",
            "CUDA 13.x",
        ),
        ({"variables__CUDA_VISIBLE_DEVICES": ""}, "warning", "hides every GPU (2)", "unset it"),
        (
            {"nvidia_smi__apps": USED},
            "warning",
            "GPU 0: 615 of 143771 MiB are taken by pid 4211 (python3, 1200 MiB)",
            "wait",
        ),
        (
            {"nvidia_smi__gpus": SMI["gpus"].replace("143156", "100000", 1)},
            "warning",
            "GPU 0: 43771 of 143771 MiB are taken by a process that is not seen from here",
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            {"nvidia_smi__gpus": with_mode("Prohibited")},
            "problem",
            "GPU 0 is in compute mode Prohibited",
            "-c DEFAULT",
        ),
        (
            {"nvidia_smi__gpus": with_mode("Exclusive_Process"), "nvidia_smi__apps": USED},
            "problem",
            "compute mode Exclusive_Process and taken by pid 4211",
            "wait",
        ),
        (
            {"nvidia_smi__peers": SMI["peers"].replace("\tOK", "\tCNS")},
            "warning",
            "0-1 (CNS)",
            "host's memory",
        ),
    ],
)
def test_trouble(changes: dict[str, Any], status: str, found: str, advice: str) -> None:
    *_, one = gpus("d1", facts(**changes))
    assert (one.check, one.status) == ("gpus", status)
    assert found in one.found
    assert advice in one.advice


@pytest.mark.parametrize(
    "changes",
    [
        {"versions__CUDA": "13.4"},  # within a major version an older driver does
        {"versions__torch": None, "versions__CUDA": None},  # told elsewhere
        {"nvidia_smi__gpus": with_mode("Exclusive_Process")},
        {"variables__CUDA_VISIBLE_DEVICES": "1"},
        {"nvidia_smi__topology": None, "nvidia_smi__peers": None, "nvidia_smi__overview": None},
    ],
)
def test_what_is_no_trouble(changes: dict[str, Any]) -> None:
    assert [one.status for one in gpus("d1", facts(**changes))] == ["ok"]


def test_a_mixed_table_of_links() -> None:
    rows = (
        ["", "GPU0", "GPU1", "NIC0"],
        ["GPU0", " X ", "PIX", "PHB"],
        ["GPU1", "PIX", " X ", "SYS"],
        ["NIC0", "PHB", "SYS", " X "],
    )
    links = read_links("\n".join("\t".join(row) for row in rows))
    assert (links[0, 1], links[1, 0]) == ("PIX", "PIX")


def test_hosts_with_other_gpus() -> None:
    assert alike({"d1": facts(), "d2": facts()}) == []
    (one,) = alike({"d1": facts(), "d2": facts(nvidia_smi=None)})
    assert one.status == "warning"
    assert "d1 2 x NVIDIA H200, d2 none" in one.found
    assert "slots=N" in one.advice


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 2),
        ({"variables__CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"variables__CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"versions__CUDA": None}, 0),
        ({"nvidia_smi": None}, 0),
        ({"nvidia_smi__apps": USED}, 2),
    ],
)
def test_how_many_a_job_can_use(changes: dict[str, Any], count: int) -> None:
    assert usable("d1", facts(**changes)) == count

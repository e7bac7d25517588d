"""Links by the times of measured collectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allhands import UserError
from allhands.comm.traffic import Collective
from allhands.planning.machines import rounds_of
from allhands.planning.measured_profile import MeasuredProfile

SIZES = (4096, 65536, 524288, 4194304)


def rows(kind: str, latency: float, per_byte: float, ranks: int) -> list[dict[str, float]]:
    found = []
    for size in SIZES:
        sent = Collective(kind, size, ranks).sent
        seconds = latency * rounds_of(kind, ranks) + per_byte * sent
        found.append({"bytes": size, "seconds": seconds, "cpu": seconds / 10})
    return found


def profile(path: Path, **places: tuple[float, float]) -> Path:
    links: dict[str, Any] = {
        place: {
            "ranks": 2,
            "hosts": 2,
            "backend": "gloo",
            "kinds": {kind: rows(kind, *numbers, 2) for kind in ("all_reduce", "send")},
        }
        for place, numbers in places.items()
    }
    path.write_text(json.dumps({"links": links}))
    return path


def test_latency_and_bandwidth_are_found_again_and_hold_for_other_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    links = MeasuredProfile(profile(tmp_path / "a.json", between=(2e-4, 8e-8))).links()
    assert links is not None
    for ranks in (2, 8):
        sent = Collective("all_reduce", 10**6, ranks).sent
        expected = 2e-4 * rounds_of("all_reduce", ranks) + 8e-8 * sent
        assert links.seconds(sent, "all_reduce", ranks, 2) == pytest.approx(expected)
        assert links.cpu(sent, "all_reduce", ranks, 2) == pytest.approx(expected / 10)
    # What was not measured is as slow as a message, and a host's own link as one between hosts.
    message = 2e-4 + 8e-8 * 10**6
    assert links.seconds(1e6, "scatter", 2, 1) == pytest.approx(2e-4 * 1 + 8e-8 * 1e6)
    assert links.seconds(1e6, "send", 2, 1) == pytest.approx(message)


def test_links_of_a_host_and_between_hosts_are_told_apart(tmp_path: Path) -> None:
    links = MeasuredProfile(
        profile(tmp_path / "a.json", inside=(1e-5, 1e-9), between=(1e-4, 1e-7))
    ).links()
    assert links is not None
    assert links.seconds(1e6, "send", 2, 1) < links.seconds(1e6, "send", 2, 2) / 10


def test_times_between_sizes_lie_on_lines_between_those_measured(tmp_path: Path) -> None:
    path = profile(tmp_path / "a.json", between=(1e-4, 1e-7))
    found = json.loads(path.read_text())
    # A burst goes at once, what is larger at the link's rate, and a time that falls is noise.
    measured = (2e-4, 1e-4, 50e-3, 450e-3)
    for row, seconds in zip(found["links"]["between"]["kinds"]["send"], measured, strict=True):
        row["seconds"] = seconds
    path.write_text(json.dumps(found))
    links = MeasuredProfile(path).links()
    assert links is not None

    def message(size: float) -> float:
        return links.seconds(size, "send", 2, 2)

    assert message(10) == message(SIZES[0]) == message(SIZES[1]) == pytest.approx(1.5e-4)
    assert message(SIZES[2]) == pytest.approx(50e-3)
    assert message((SIZES[2] + SIZES[3]) / 2) == pytest.approx(250e-3)
    # The last line goes on.
    assert message(2 * SIZES[3] - SIZES[2]) == pytest.approx(850e-3)


def test_a_profile_without_links_and_one_with_broken_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"operations": {}}')
    assert MeasuredProfile(path).links() is None
    for text in (
        '{"links": [1]}',
        '{"links": {"between": {}}}',
        '{"links": {"inside": {"ranks": 2, "kinds": {"send": []}}}}',
    ):
        path.write_text(text)
        with pytest.raises(UserError, match="has no times of collectives"):
            MeasuredProfile(path).links()

"""Hosts as users write them, and which worker goes where."""

from __future__ import annotations

from pathlib import Path

import pytest

from allhands.errors import UserError
from allhands.launch.hosts import HostSpec, deal, read_hosts


def test_a_file_of_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(
        "# all of them\n\nd1\nd2 slots=4 # two GPUs\n  "
        "ubuntu@10.0.0.3:2222\tslots=1\n[fe80::1]:22\n"
    )
    assert read_hosts(str(tmp_path / "hosts")) == [
        HostSpec("d1"),
        HostSpec("d2", slots=4),
        HostSpec("10.0.0.3", "ubuntu", 2222, 1),
        HostSpec("fe80::1", port=22),
    ]


def test_a_list_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_hosts("d1,me@d2:23") == [HostSpec("d1"), HostSpec("d2", "me", 23)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "names no host"),
        ("-oProxyCommand=x", "is no host"),
        ("d1;rm", "is no host"),
        ("d1:99999", "between 1 and 65535"),
        ("d1:x", "is no host"),
        ("d1 slots=0", "only slots=N may follow"),
        ("d1 slot=2", "only slots=N may follow"),
        ("d1\nd1", "named twice"),
    ],
)
def test_a_line_that_cannot_be_read_is_shown(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# comment\n" + line + "\n")
    with pytest.raises(UserError, match=message) as error:
        read_hosts(str(tmp_path / "hosts"))
    assert str(tmp_path / "hosts") in str(error.value)


@pytest.mark.parametrize(
    ("slots", "workers", "expected"),
    [
        ([None, None], 4, [2, 2]),
        ([None, None], 5, [3, 2]),
        ([None, None, None], 2, [1, 1, 0]),
        ([2, 4], 3, [2, 1]),
        ([2, 4], 6, [2, 4]),
        ([4, None], 5, [4, 1]),
    ],
)
def test_workers_are_dealt_to_the_hosts(
    slots: list[int | None], workers: int, expected: list[int]
) -> None:
    assert deal([f"d{index}" for index in range(len(slots))], slots, workers) == expected


def test_too_few_slots() -> None:
    with pytest.raises(
        UserError, match=r"7 workers, but the hosts have 6 slots \(d1 2, d2 4\); write -n 6"
    ):
        deal(["d1", "d2"], [2, 4], 7)

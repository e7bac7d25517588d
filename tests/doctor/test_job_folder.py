"""What is said of the job's folder."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.doctor.job_folder import folder, sharing

GOOD = {
    "path": "/job",
    "exists": True,
    "used": "/job",
    "is_folder": True,
    "error": None,
    "total": 100 << 30,
    "free": 50 << 30,
    "files_free": 100000,
    "type": "ext4",
}


@pytest.mark.parametrize(
    ("changes", "made", "status", "found", "advice"),
    [
        ({}, False, "ok", "/job: can be written, 50.0 GiB free (ext4)", ""),
        ({"files_free": None, "type": None}, False, "ok", "50.0 GiB free", ""),
        (
            {"exists": False, "is_folder": False},
            False,
            "problem",
            "there is no /job",
            "--sync-dst-dir DIR",
        ),
        ({"exists": False, "used": "/"}, True, "ok", "/job will be made in /", ""),
        ({"is_folder": False}, False, "problem", "/job is not a folder", "name another"),
        (
            {"error": "Permission denied"},
            False,
            "problem",
            "/job cannot be written: Permission denied",
            "ls -ld /job",
        ),
        ({"error": "Read-only file system"}, True, "problem", "Read-only file system", "may write"),
        (
            {"error": "No space left on device", "full": True},
            False,
            "problem",
            "No space left",
            "delete what is not needed",
        ),
        ({"files_free": 12}, False, "problem", "only 12 more files fit", "df -i"),
        ({"free": 300 << 20}, False, "warning", "300 MiB free (ext4), which is little", "du -sh"),
    ],
)
def test_folder(changes: dict[str, Any], made: bool, status: str, found: str, advice: str) -> None:
    one = folder("d1", {**GOOD, **changes}, made_by_launch=made)
    assert (one.host, one.check, one.status) == ("d1", "folder", status)
    assert found in one.found
    assert advice in one.advice


BOTH = {"d1": ["d1", "d2"], "d2": ["d1", "d2"]}
OWN = {"d1": ["d1"], "d2": ["d2"]}


@pytest.mark.parametrize(
    ("seen", "here", "copies", "status", "found", "advice"),
    [
        (
            BOTH,
            None,
            False,
            "ok",
            "/job is the same on d1, d2",
            "resumes from its checkpoints on any",
        ),
        (BOTH, ["d1", "d2"], False, "ok", "on d1, d2, and on this machine", "resumes"),
        (BOTH, [], False, "ok", "this machine has another one of that name", "resumes"),
        (BOTH, None, True, "ok", "is the same", "is not needed"),
        (
            OWN,
            None,
            False,
            "warning",
            "not the same on all hosts: d1 | d2",
            "let --sync-dst-dir DIR copy them",
        ),
        (
            OWN,
            None,
            True,
            "ok",
            "d1 | d2",
            "a logdir on a disk that all share. --sync-dst-dir copies",
        ),
    ],
)
def test_sharing(
    seen: dict[str, list[str]],
    here: list[str] | None,
    copies: bool,
    status: str,
    found: str,
    advice: str,
) -> None:
    one = sharing("/job", seen, here, copies=copies)
    assert (one.host, one.check, one.status) == ("", "sharing", status)
    assert found in one.found
    assert advice in one.advice


def test_some_hosts_share_and_one_does_not() -> None:
    seen = {"d1": ["d1", "d3"], "d2": ["d2"], "d3": ["d1", "d3"]}
    assert sharing("/job", seen, None, copies=False).values["groups"] == [["d1", "d3"], ["d2"]]

"""From what hosts told about the job's folder to findings: whether it can be used, and whether all
see the same."""

from __future__ import annotations

from functools import partial
from typing import Any

from allhands.doctor.finding import Finding, size

GIB = 1 << 30
Facts = dict[str, Any]


def folder(host: str, told: Facts, *, made_by_launch: bool) -> Finding:
    """Whether a job can run and write there. `made_by_launch`: it is that of --sync-dst-dir, which
    a launch makes."""
    result = partial(Finding, host, "folder")
    path, used = told["path"], told["used"]
    values = {
        "path": path,
        "exists": told["exists"],
        "free_bytes": told.get("free"),
        "type": told.get("type"),
        "writable": bool(told["is_folder"] and not told["error"]),
    }
    if not told["exists"] and not made_by_launch:
        advice = (
            "`allhands launch` would run there and fail: copy the files with --sync-dst-dir DIR, "
            f"run it in a folder that {host} has too, or mount the shared disk there"
        )
        return result("problem", f"there is no {path}", advice, values)
    if not told["is_folder"]:
        return result(
            "problem", f"{used} is not a folder", "name another, or move that file away", values
        )
    if told["error"]:
        advice = (
            "delete what is not needed, or name a folder on another disk"
            if told.get("full")
            else "choose a folder that this user may write, or let its owner allow it (`ls -ld "
            f"{used}`)"
        )
        return result("problem", f"{used} cannot be written: {told['error']}", advice, values)
    if told["exists"]:
        found = f"{path}: can be written, {size(told['free'])} free"
    else:
        found = f"{path} will be made in {used}"
    found += f" ({told['type']})" if told["type"] else ""
    if told["files_free"] is not None and told["files_free"] < 1000:
        advice = "delete files: the file system has room, but can hold no more of them (`df -i`)"
        return result(
            "problem", f"{found}, but only {told['files_free']} more files fit", advice, values
        )
    if told["free"] < GIB:
        advice = (
            "checkpoints hold the weights and the optimizer's state, often three times the "
            "model: make room (`df -h`, `du -sh *`)"
        )
        return result("warning", found + ", which is little", advice, values)
    return result("ok", found, values=values)


def sharing(
    path: str, seen: dict[str, list[str]], here: list[str] | None, *, copies: bool
) -> Finding:
    """Whether the folder is the same on all hosts.

    Args:
        path: the folder.
        seen: for each host that has it, whose marks it found there, its own included.
        here: whose marks this machine found; None when it has no such folder.
        copies: the job copies its files there with --sync-dst-dir.
    """
    result = partial(Finding, "", "sharing")
    hosts, groups = list(seen), list[list[str]]()
    for host in hosts:
        for group in groups:
            if host in seen[group[0]] and group[0] in seen[host]:
                group.append(host)
                break
        else:
            groups.append([host])
    values = {"groups": groups, "here": here}
    if len(groups) == 1:
        found = f"{path} is the same on {', '.join(hosts)}"
        found += (
            ""
            if here is None
            else ", and on this machine"
            if here == hosts
            else "; this machine has another one of that name"
        )
        advice = (
            "a logdir in it is seen by all hosts, so a job resumes from its checkpoints on "
            "any of them"
        )
        advice += (
            "; --sync-dst-dir would copy the same files once a host, and is not needed"
            if copies
            else ""
        )
        return result("ok", found, advice, values)
    told = " | ".join(", ".join(group) for group in groups)
    found = f"{path} is not the same on all hosts: {told}"
    advice = (
        "checkpoints in a logdir there lie on the host of rank 0 only, and another host cannot "
        "resume from them: give a logdir on a disk that all share. "
    )
    advice += (
        "--sync-dst-dir copies the files of the job to each of them, as it should"
        if copies
        else "The job's files must be on each host: let --sync-dst-dir DIR copy them"
    )
    return result("ok" if copies else "warning", found, advice, values)

"""`allhands doctor`: whether this machine, or some hosts, can run a job, and what to do where they
cannot."""

from __future__ import annotations

import json as json_format
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from allhands.cli.launch import forwarded_variables
from allhands.doctor import Report, Request, examine
from allhands.doctor.render import as_json, show
from allhands.errors import UserError
from allhands.launch.hosts import read_hosts
from allhands.launch.signals import leaves_on_sigterm


def doctor(
    *,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            "-H",
            help="A file with one host a line, or a list: d1,d2. Default: this machine alone.",
        ),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            "--dir", help="The folder in which the job runs. Default: the working folder."
        ),
    ] = None,
    sync_dst_dir: Annotated[
        str | None,
        typer.Option(
            help="The folder to which `allhands launch --sync-dst-dir` will copy, instead of --dir."
        ),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="The Python on the hosts. Default: the path of this one.")
    ] = None,
    all_reduce: Annotated[
        bool,
        typer.Option(
            "--all-reduce/--no-all-reduce",
            "--allreduce/--no-allreduce",
            help="Start workers and run a real all-reduce.",
        ),
    ] = True,
    gpus: Annotated[
        bool,
        typer.Option(
            "--gpus", help="The all-reduce has a worker for each GPU, instead of one a host."
        ),
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Measure collectives of all kinds, and write their times here for `allhands plan "
            "--profile`.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check whether this machine, or the hosts of a job, can train together.

    Looks at ssh, versions, clocks, names, ports, GPUs, limits and the job's folder, and runs a real
    all-reduce. Says what to do about what it finds. The exit code is 0 without problems (there may
    be warnings), 1 with problems, and 2 for wrong use.
    """
    if not hosts:
        for name, value in {"--sync-dst-dir": sync_dst_dir, "--python": python}.items():
            if value:
                raise UserError(
                    f"{name} is about other hosts; write -H HOSTS as well, or leave it out"
                )
    if folder and sync_dst_dir:
        raise UserError(
            "--dir and --sync-dst-dir both name the job's folder; write the one that `allhands "
            "launch` will use"
        )
    if gpus and not all_reduce:
        raise UserError("--gpus is about the all-reduce; leave out --no-all-reduce, or --gpus")
    if profile is not None and not all_reduce:
        raise UserError(
            "--profile is about the all-reduce; leave out --no-all-reduce, or --profile"
        )
    path = sync_dst_dir or folder or os.getcwd()
    request = Request(
        hosts=read_hosts(hosts) if hosts else (),
        python=python or sys.executable,
        env=forwarded_variables(),
        folder=path if sync_dst_dir else os.path.abspath(os.path.expanduser(path)),
        copies=bool(sync_dst_dir),
        all_reduce=all_reduce,
        kinds=profile is not None,
        per_gpu=gpus,
    )
    # Without it the probes would still end, by the end of their input, but what was made here would
    # stay.
    with leaves_on_sigterm():
        report = examine(
            request, lambda text: print(f"allhands: {text}", file=sys.stderr, flush=True)
        )
    if profile is not None:
        _write(profile, report)
    if json:
        print(as_json(report))
    else:
        show(report)
    return 1 if report.problems else 0


def _write(profile: Path, report: Report) -> None:
    """Put the times of collectives into a profile, beside what else it has."""
    found = next((one.values for one in report.findings if "kinds" in one.values), None)
    if found is None:
        raise UserError(
            f"{profile} was not written: no collective was measured; mend what the doctor names, "
            "and have at least two workers"
        )
    text = profile.read_text(encoding="utf-8") if profile.exists() else "{}"
    links = {key: found[key] for key in ("ranks", "hosts", "backend", "kinds")}
    known = json_format.loads(text)
    place = "between" if found["hosts"] > 1 else "inside"
    known["links"] = {**known.get("links", {}), place: links}
    profile.write_text(json_format.dumps(known, indent=1) + "\n", encoding="utf-8")

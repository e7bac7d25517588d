"""`allhands launch`: run a script, module or program in several workers of this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

from allhands.errors import UserError
from allhands.launch import Command, launch_local
from allhands.launch.processes import cores


def launch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]",
            help="A Python script, or any program, with its arguments, options included.",
            show_default=False,
        ),
    ] = None,
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            help="How many workers. Default: one for each GPU, or for each core without GPUs.",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as for python -m.")] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Also write each worker's output to a file in this folder.")] = None,
    prefix: Annotated[bool, typer.Option(help="Start each line of output with the rank that wrote it.")] = True,
    grace: Annotated[float, typer.Option(help="Seconds to save and end for workers that are asked to stop.")] = 5.0,
    heartbeat_timeout: Annotated[
        float,
        typer.Option(help="Seconds without a sign of life after which a worker has failed; 0 waits for ever."),
    ] = 60.0,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads for each worker. Default: OMP_NUM_THREADS, or the cores shared out evenly."),
    ] = None,
    preload: Annotated[bool, typer.Option(help="Import torch once for all workers, not once in each.")] = True,
) -> int:
    """Run a script, module or program in several workers.

    Each worker gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
    allhands.init() and torch.distributed.init_process_group() find the others by them. When one worker fails,
    the others are stopped; the exit code is that of the first one that failed. SIGTERM stops the workers,
    SIGUSR1 and SIGUSR2 are passed on to them.
    """
    if not command:
        raise UserError("no script was given; write `allhands launch -n 2 train.py`")
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: it must be at least 1")
    chosen = _module(command) if module else parse(command)
    return launch_local(
        chosen,
        workers if workers is not None else default_workers(),
        log_dir=log_dir,
        prefix=prefix,
        grace=grace,
        heartbeat_timeout=heartbeat_timeout,
        threads=threads,
        preload=preload,
    )


def _module(words: list[str]) -> Command:
    return Command("module", words[0], tuple(words[1:]))


def parse(words: list[str]) -> Command:
    """Tell a Python script from another program.

    Raises:
        UserError: there is no such file or program.
    """
    if len(words) == 1 and " " in words[0] and not Path(words[0]).exists():
        words = shlex.split(words[0])  # a whole command in quotes, as launchers of parameter servers take it
    target, args = words[0], tuple(words[1:])
    path = Path(target)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise UserError(f"{target!r} is a folder without a __main__.py")
        return Command("script", target, args)
    if path.suffix in (".py", ".pyz", ".zip"):
        if not path.is_file():
            raise UserError(f"there is no script {target!r}{_similar(path)}")
        return Command("script", target, args)
    if path.is_file() and not os.access(path, os.X_OK) and os.sep not in target:
        return Command("script", target, args)
    program = shutil.which(target)
    if program is None:
        raise UserError(f"there is no script or program {target!r}{_similar(path)}")
    return Command("program", target, args)


def _similar(path: Path) -> str:
    import difflib

    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f": there is no folder {str(path.parent)!r}"
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    where = "the working folder" if path.parent == Path() else str(path.parent)
    return f" (looked in {where})" + (f"; did you mean {str(path.parent / close[0])!r}?" if close else "")


def default_workers() -> int:
    """One worker for each GPU that CUDA_VISIBLE_DEVICES leaves, or for each core when there is none."""
    return _gpus() or cores()


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    try:
        # Asking the driver's tool takes less than importing torch.
        answer: Any = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines()) if answer.returncode == 0 else 0

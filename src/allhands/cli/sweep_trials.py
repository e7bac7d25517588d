"""The trials of a sweep: processes, their folders, and the table of what they have measured."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allhands.atomic_write import atomic_write, atomic_write_text
from allhands.cli.run_folder import read_folder
from allhands.errors import UserError
from allhands.launch.processes import gpus
from allhands.world.cores import cores

Propose = Callable[[int], dict[str, Any] | None]

_DONE, _FAILED, _RUNNING = "done", "failed", "running"
_PAUSE = 0.2  # seconds between two looks at the processes
_GRACE = 60.0  # seconds for their last checkpoints


@dataclass
class SweepTrial:
    """One training of a sweep.

    Attributes:
        number: counted from 1.
        values: by key of the run file.
        state: "running", "done" or "failed".
        value: of the main metric at the best row.
        seconds: that it took, in this call.
    """

    number: int
    values: dict[str, Any]
    state: str = _RUNNING
    value: float = math.nan
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"trial-{self.number:03d}"

    @property
    def is_done(self) -> bool:
        """Whether it has a value."""
        return self.state == _DONE


@dataclass
class Trials:
    """All trials, in the folder of the sweep.

    Attributes:
        folder: of the sweep.
        command: the words of ``allhands run`` that are the same for all.
        workers: of each trial.
        parallel: trials at a time; 0 takes as many as there are GPUs or cores for.
        say: takes a line to print.
    """

    folder: Path
    command: Sequence[str]
    workers: int
    parallel: int
    say: Callable[[str], None]
    found: list[SweepTrial] = field(default_factory=list)

    def open(self, definition: Mapping[str, Any]) -> None:
        """Take up what an earlier call has done.

        Raises:
            UserError: the folder is that of another sweep.
        """
        path = self.folder / "sweep.json"
        text = json.dumps(definition, indent=1, sort_keys=True, default=str)
        if path.exists():
            before = path.read_text(encoding="utf-8")
            if before != text:
                raise UserError(_another(self.folder, json.loads(before), json.loads(text)))
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        stored = self.folder / "trials.json"
        if stored.exists():
            self.found = [
                SweepTrial(**one) for one in json.loads(stored.read_text(encoding="utf-8"))
            ]

    def run(self, propose: Propose, tell: Callable[[SweepTrial], None]) -> None:
        """Run all trials that are not done: those that were begun before, and then what `propose`
        gives for the next number, until that is None.

        Args:
            propose: the values of a trial by its number.
            tell: is told of each trial that has ended.
        """
        slots = self.parallel or max(1, (gpus() or cores()) // self.workers)
        waiting = [trial for trial in self.found if not trial.is_done]
        running: dict[int, tuple[SweepTrial, subprocess.Popen[bytes], float]] = {}
        try:
            while True:
                while len(running) < slots:
                    trial = waiting.pop(0) if waiting else self._next(propose)
                    if trial is None:
                        break
                    slot = next(n for n in range(slots) if n not in running)
                    trial.state = _RUNNING
                    running[slot] = (trial, self._start(trial, slot, slots), time.monotonic())
                    self._store()
                if not running:
                    return
                time.sleep(_PAUSE)
                for slot, (trial, process, began) in list(running.items()):
                    if process.poll() is not None:
                        del running[slot]
                        trial.seconds = round(time.monotonic() - began, 2)
                        self._end(trial, process.returncode)
                        tell(trial)
        finally:
            _stop([process for _, process, _ in running.values()])

    def _next(self, propose: Propose) -> SweepTrial | None:
        values = propose(len(self.found) + 1)
        if values is None:
            return None
        self.found.append(SweepTrial(len(self.found) + 1, values))
        return self.found[-1]

    def _start(self, trial: SweepTrial, slot: int, slots: int) -> subprocess.Popen[bytes]:
        logdir = self.folder / trial.name
        logdir.mkdir(exist_ok=True)
        changes = [f"{key}={json.dumps(value)}" for key, value in trial.values.items()]
        changes += [f"logdir={json.dumps(str(logdir))}", "resume=auto", "verbose=false"]
        changes.append(f"workers={self.workers}")
        code = "from allhands.cli.main import main; main()"
        words = [sys.executable, "-c", code, "run", *self.command, *changes]
        environment = dict(os.environ)
        if gpus():
            own = range(slot * self.workers, (slot + 1) * self.workers)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(n % gpus()) for n in own)
        threads = max(1, cores() // (slots * self.workers))
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        with (logdir / "output.txt").open("ab") as output:
            return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def _end(self, trial: SweepTrial, code: int) -> None:
        logdir = self.folder / trial.name
        trial.state = _DONE if code == 0 else _FAILED
        if code == 0:
            folder = read_folder(logdir)
            best = folder.best()
            name, _ = folder.main_metric()
            trial.value = math.nan if best is None else folder.rows[name][best]
            what = f"{name} {trial.value:.6g}"
        else:
            lines = (logdir / "output.txt").read_text(errors="replace").strip().splitlines()
            what = f"failed with code {code}: {lines[-1] if lines else 'it printed nothing'}"
        said = ", ".join(f"{key}={value}" for key, value in trial.values.items())
        self.say(f"{trial.name}: {said}: {what} ({trial.seconds:.1f} s)")
        self._store()

    def _store(self) -> None:
        text = json.dumps([vars(one) for one in self.found], indent=1)
        atomic_write_text(self.folder / "trials.json", text)
        keys = list(dict.fromkeys(key for one in self.found for key in one.values))
        with (
            atomic_write(self.folder / "trials.csv") as aside,
            aside.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(["trial", "state", "value", "seconds", *keys])
            for one in self.found:
                values = [one.values.get(key, "") for key in keys]
                writer.writerow([one.name, one.state, one.value, one.seconds, *values])


def _another(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    differ = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    which = "; ".join(f"{key}: {before.get(key)}, now {now.get(key)}" for key in differ)
    return (
        f"{folder} is the folder of another sweep ({which}); name another one: --logdir FOLDER, or "
        "repeat the first call to go on with it"
    )


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let them save a checkpoint and leave."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    end = time.monotonic() + _GRACE
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

"""A timeline of some optimizer steps (``profile=``): a trace for each rank, and where a step's time
goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from allhands.world import World

#: What the parts of a step are called, in a trace and in the summary.
PHASES = ("data", "forward", "backward", "exchange", "optimizer", "captured step")
_SKIPPED = 5  # first steps, in which libraries set themselves up
# Events of an exchange between ranks that runs beside the rest of a step, and of one that does not.
_MESSAGES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel", "mpi:")
_WAITS = "sockets:"
Ranges = list[tuple[float, float]]


class Profile:
    """Records the steps of a training that follow the first five.

    Args:
        steps: how many.
        folder: where ``rank-0.json`` and so on are written, in Chrome's trace format.
        world: the ranks; all record the same steps.
        say: takes a line to print.
    """

    def __init__(self, steps: int, folder: Path, world: World, say: Callable[[str], None]) -> None:
        self.steps, self.folder, self.world, self.say = steps, folder, world, say
        self._taken = 0
        self._running: Any = None

    def label(self, phase: str) -> AbstractContextManager[Any]:
        """What runs in this context is called `phase`."""
        return record_function(phase) if self._running is not None else nullcontext()

    def reading(self, steps: Iterable[Any]) -> Iterator[Any]:
        """The same steps; what it takes to read them is called "data"."""
        iterator = iter(steps)
        while True:
            with self.label("data"):
                step = next(iterator, None)
            if step is None:
                return
            yield step

    def step(self) -> None:
        """An optimizer step is over."""
        self._taken += 1
        if self._taken == _SKIPPED:
            activities = [ProfilerActivity.CPU]
            if self.world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._running = profile(activities=activities)
            self._running.start()
        elif self._taken == _SKIPPED + self.steps:
            self.close()

    def close(self) -> None:
        """Write what has been recorded, and print the summary."""
        if self._running is None:
            return
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        ended, self._running = self._running, None
        ended.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank-{self.world.rank}.json"
        ended.export_chrome_trace(str(path))
        recorded = min(self.steps, self._taken - _SKIPPED)
        if self.world.rank == 0 and recorded:
            for line in summary(ended.events(), recorded):
                self.say(line)
            self.say(
                f"profile: written to {self.folder}, a file a rank; look at them in "
                "ui.perfetto.dev or chrome://tracing"
            )


def summary(events: Iterable[Any], steps: int) -> list[str]:
    """Where a step's time went, as lines to print.

    Args:
        events: of torch.profiler.
        steps: how many they are of.
    """
    phases: dict[str, Ranges] = {name: [] for name in PHASES}
    messages: Ranges = []
    waits: Ranges = []
    work: Ranges = []
    for event in events:
        span = event.time_range.start, event.time_range.end
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if any(event.name.startswith(name) for name in _MESSAGES):
            messages.append(span)
        elif event.name.startswith(_WAITS):
            waits.append(span)
        elif event.name in phases:
            if not on_device:
                phases[event.name].append(span)
        elif on_device:
            work.append(span)
    begun = [span for spans in phases.values() for span in spans]
    if not begun:
        return ["profile: no step was recorded"]
    whole = (max(end for _, end in begun) - min(start for start, _ in begun)) / steps
    lines = [f"profile: {steps} steps, {whole / 1000:.3f} ms each; of that, on the host of rank 0"]
    named = 0.0
    for name, spans in phases.items():
        if spans:
            taken = sum(end - start for start, end in merged(spans)) / steps
            named += taken
            lines.append(_row(name, taken, whole))
    lines.append(_row("everything else", max(0.0, whole - named), whole))
    if work:
        lines.append(
            _row("the GPU computes", sum(end - start for start, end in merged(work)) / steps, whole)
        )
    if messages or waits:
        taken = sum(end - start for start, end in merged([*messages, *waits])) / steps
        if work:
            beside = merged(work)
        else:
            beside = merged([*phases["forward"], *phases["backward"], *phases["data"]])
        hidden = overlap(merged(messages), beside) / steps
        lines.append(
            f"{_row('messages between ranks', taken, whole)}; {hidden / max(taken, 1e-9):.0%} of "
            "it beside other work"
        )
    return lines


def _row(name: str, taken: float, whole: float) -> str:
    return f"  {name:22s} {taken / 1000:9.3f} ms {taken / max(whole, 1e-9):5.0%}"


def merged(spans: Ranges) -> Ranges:
    """The same time in spans that do not overlap, in order."""
    found: Ranges = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def overlap(one: Ranges, other: Ranges) -> float:
    """The time that lies in both; each in order and without overlaps of its own."""
    total, place = 0.0, 0
    for start, end in one:
        while place < len(other) and other[place][1] <= start:
            place += 1
        at = place
        while at < len(other) and other[at][0] < end:
            total += min(end, other[at][1]) - max(start, other[at][0])
            at += 1
    return total

"""What ends the waiting of a GPU for a rank that does not come; with a group and events that only
say what was done with them."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.horovod import lanes
from allhands.horovod.lanes import Lane


class Group:
    """One of nccl, which counts how often it was aborted."""

    def __init__(self) -> None:
        self.aborted = 0

    def _get_backend(self, device: Any) -> Group:
        return self

    def abort(self) -> None:
        self.aborted += 1


class Reached:
    """An event that a GPU reaches after it was asked so often."""

    def __init__(self, after: float) -> None:
        self.after = after

    def query(self) -> bool:
        self.after -= 1
        return self.after < 0


class Link:
    def promise(self, set_id: int, parts: Any) -> None: ...


@pytest.mark.parametrize(("after", "aborted"), [(2, 0), (float("inf"), 1)])
def test_what_a_stream_still_waits_for_after_a_step_is_aborted(
    after: float, aborted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_GRACE_S", 0.5)
    lane, group = Lane(0, Link(), 0), Group()  # type: ignore[arg-type]
    lane.group = group
    step = lane.promise([], lambda round_: None)
    step.reached = Reached(after)
    step.works.clear()  # as a step does that its stream has yet to take
    lane.promise([], lambda round_: None)
    lane.fail("rank 1 did not end it")
    lane.give_up(on_gpu=True)
    assert group.aborted == aborted

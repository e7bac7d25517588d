"""What holds exchanges of a group that is aborted."""

from __future__ import annotations

from allhands.world.abort import reset_at_abort, reset_captured


class Graphs:
    resets = 0

    def reset(self) -> None:
        self.resets += 1


def test_what_is_still_there_is_reset() -> None:
    graphs, gone = Graphs(), Graphs()
    reset_at_abort(graphs)
    reset_at_abort(gone)
    del gone
    reset_captured()
    assert graphs.resets == 1

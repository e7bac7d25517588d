from __future__ import annotations

from allhands.data.replica_shares import of_each, put_together


def test_steps_of_several_shares_are_put_together_and_taken_apart():
    first = [(["a", "b"], [2, 2], 10, False), (["c"], [1], 2, False)]
    second = [(["d"], [3], 10, False), ([], [], 2, True)]
    steps = list(put_together([iter(first), iter(second)], 1, 3, True))
    assert [list(counts) for _, counts, _, _ in steps] == [[2, 2, 3], [1]]
    assert [counts.first for _, counts, _, _ in steps] == [4, 1]
    apart = [[(batches, counts, total) for batches, counts, total, _ in of_each(s)] for s in steps]
    assert apart == [
        [(["a", "b"], [2, 2], 10), (["d"], [3], 10)],
        [(["c"], [1], 2), ([], [], 2)],
    ]


def test_a_rank_without_a_share_counts_the_steps():
    steps = list(put_together([iter([(["a"], [4], 8, False)])], 2, 2, False))
    assert [(batches, list(counts), total) for batches, counts, total, _ in steps] == [([], [], 8)]
    assert list(of_each(steps[0])) == []

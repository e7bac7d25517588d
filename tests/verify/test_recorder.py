"""What a run records of its batches."""

from __future__ import annotations

import torch

from allhands.verify.recorder import form_of, row_checksums


def test_checksums_of_rows_do_not_depend_on_how_a_batch_is_cut() -> None:
    x, y = torch.randn(6, 3), torch.arange(6)
    whole = row_checksums((x, y))
    assert whole is not None
    assert len(set(whole)) == 6
    assert whole == [*row_checksums((x[:2], y[:2])), *row_checksums((x[2:], y[2:]))]  # type: ignore[misc]
    assert row_checksums({"features": x, "targets": y}) == whole


def test_another_target_is_another_sample() -> None:
    x = torch.randn(2, 3)
    assert row_checksums((x, torch.tensor([0, 1]))) != row_checksums((x, torch.tensor([0, 2])))


def test_views_bools_and_scalars() -> None:
    x = torch.randn(3, 4)
    assert row_checksums([x.t().contiguous().t()]) == row_checksums([x])
    assert len(row_checksums([torch.tensor([True, False])]) or ()) == 2
    # A number of the batch as a whole is no sample.
    assert row_checksums([x, torch.tensor(3.0)]) == row_checksums([x])


def test_batches_without_rows_have_no_checksums() -> None:
    assert row_checksums((torch.zeros(3, 2), torch.zeros(5))) is None
    assert row_checksums(("text", 3)) is None


def test_the_form_is_that_of_a_sample() -> None:
    x = torch.zeros(3, 2)
    assert form_of((x, torch.zeros(3))) == form_of((x[:1], torch.ones(1))) > 0
    assert form_of((x,)) != form_of((torch.zeros(3, 4),))

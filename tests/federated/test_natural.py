"""Data sets whose clients are real."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allhands.errors import UserError
from allhands.federated import natural

DATA = Path(os.environ.get("ALLHANDS_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
needs_data = pytest.mark.skipif(
    not (DATA / "heart_disease_sites.npz").is_file(),
    reason="real data sets are not on this machine",
)


@needs_data
def test_digits_belong_to_their_writers():
    data, writers = natural.mnist_by_writer("test", DATA)
    assert len(writers) == 297
    assert (writers.sizes.min(), writers.sizes.max()) == (8, 130)
    writers.check_exact(len(data))
    image, label = data[0]
    assert image.shape == (1, 28, 28)
    assert int(label) == 7


@needs_data
def test_lines_belong_to_their_speakers():
    data, speakers = natural.shakespeare_by_speaker(80, DATA)
    speakers.check_exact(len(data))
    assert 200 < len(speakers) <= 309
    inputs, targets = data.tensors
    assert inputs.shape == targets.shape == (len(data), 80)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert "GLOUCESTER" in {name.upper() for name in speakers.names}


@needs_data
def test_patients_belong_to_their_hospitals():
    data, hospitals = natural.heart_disease_by_hospital(DATA)
    assert dict(zip(hospitals.names, hospitals.sizes.tolist(), strict=True)) == {
        "cleveland": 303,
        "hungarian": 294,
        "switzerland": 123,
        "va": 200,
    }
    x, y = data.tensors
    assert x.isfinite().all()
    assert [int(y[hospitals.samples(i)].sum()) for i in range(4)] == [139, 106, 115, 149]


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(
        UserError,
        match="put heart_disease_sites.npz with the arrays x, num, site, sites into a folder",
    ):
        natural.heart_disease_by_hospital(tmp_path)
    monkeypatch.delenv("ALLHANDS_DATA", raising=False)
    with pytest.raises(UserError, match="ALLHANDS_DATA is not set"):
        natural.mnist_by_writer()
    with pytest.raises(UserError, match="split='valid'; write 'train' or 'test'"):
        natural.mnist_by_writer("valid", tmp_path)

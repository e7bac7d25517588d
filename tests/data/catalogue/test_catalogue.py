from __future__ import annotations

import functools
import gzip
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from allhands.data.catalogue import VOCABULARY, info, load, names
from allhands.errors import UserError


@pytest.fixture(scope="session")
def official(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a folder with a data set's files: CIFAR-10's and MNIST's as published, and
    CIFAR-100's. To unpack 10,000 images of CIFAR takes two seconds of a core."""

    @functools.cache
    def folder_of(name: str) -> Path:
        target = tmp_path_factory.mktemp(name)
        words = [sys.executable, "write_official.py", str(target), name]
        subprocess.run(words, cwd=shared_data, check=True)
        return target

    return folder_of


@pytest.fixture(scope="session")
def python_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR as torchvision leaves it: pickles of protocol 2 with keys of bytes. The five training
    batches are one file."""
    root = tmp_path_factory.mktemp("python_version")
    generator = np.random.default_rng(0)
    data = generator.integers(0, 256, (10_000, 3072), dtype=np.uint8)
    fine, coarse = [n % 100 for n in range(10_000)], [n % 20 for n in range(10_000)]
    (root / "cifar-10-batches-py").mkdir()
    (root / "cifar-100-python").mkdir()
    batch = pickle.dumps(
        {b"data": data, b"labels": [n % 10 for n in range(10_000)], b"batch_label": b"x"}, 2
    )
    first = root / "cifar-10-batches-py" / "data_batch_1"
    first.write_bytes(batch)
    for name in ("data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        os.link(first, first.with_name(name))
    test = pickle.dumps({b"data": data, b"fine_labels": fine, b"coarse_labels": coarse}, 2)
    (root / "cifar-100-python" / "test").write_bytes(test)
    np.save(root / "expected.npy", data[:20])
    return root


def test_digits() -> None:
    train, valid = load("digits"), load("digits", "valid")
    assert (len(train), len(valid)) == (1437, 360)
    images, labels = train.tensors
    assert (images.shape, images.dtype, labels.dtype) == (
        (1437, 1, 8, 8),
        torch.float32,
        torch.int64,
    )
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)
    share = torch.bincount(valid.tensors[1]) / torch.bincount(torch.cat([labels, valid.tensors[1]]))
    assert share.min() > 0.19  # every class in proportion
    assert share.max() < 0.21
    rows = {tuple(image.flatten().tolist()) for image in torch.cat([images, valid.tensors[0]])}
    assert len(rows) == 1797  # no sample in both parts


def test_digits_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    bunch = datasets.load_digits()
    rows = {
        (*image.flatten().astype(int), label)
        for image, label in zip(bunch.images, bunch.target, strict=True)
    }
    for split in ("train", "valid"):
        images, labels = load("digits", split, dtype="uint8").tensors
        assert {
            (*image.flatten().tolist(), label.item())
            for image, label in zip(images, labels, strict=True)
        } <= rows


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "allhands\[data\]"'):
        load("digits")


@pytest.mark.slow
# rare: the test below reads CIFAR-10 in the same format.
@pytest.mark.parametrize(
    "name", [pytest.param("cifar10", marks=pytest.mark.rare), "cifar100", "mnist"]
)
def test_publishers_layout(official: Callable[[str], Path], name: str) -> None:
    entry = info(name)
    for split in ("train", "test"):
        images, labels = load(name, split, official(name)).tensors
        assert images.shape == (entry.sizes[split], *entry.input_shape)
        assert torch.bincount(labels, minlength=entry.num_classes).min() > 50
        if split == "train":  # normalised by its own mean and deviation
            # The packed CIFAR-100 is within 3 of 255.
            tolerance = 5e-3 if name == "cifar100" else 1e-4
            assert images.mean((0, 2, 3)).abs().max() < tolerance
            assert (images.std((0, 2, 3)) - 1).abs().max() < tolerance


def test_cifar10_is_the_published_one(shared_data: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(shared_data))
    try:
        from imagepack import load as unpack
        from write_official import records
    finally:
        sys.path.remove(str(shared_data))
    x, y = unpack(shared_data, "cifar10", "test")
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "test_batch.bin").write_bytes(records(x, y))
    images, labels = load("cifar10", "test", tmp_path, dtype="uint8").tensors
    assert np.array_equal(images.numpy(), x.transpose(0, 3, 1, 2))
    assert np.array_equal(labels.numpy(), y)


@pytest.mark.slow
def test_limit_and_coarse_labels(official: Callable[[str], Path]) -> None:
    root = official("cifar100")
    few, fine = load("cifar100", "test", root, limit=30), load("cifar100", "test", root)
    coarse = load("cifar100", "test", root, labels="coarse")
    assert torch.equal(few.tensors[0], fine.tensors[0][:30])
    assert coarse.tensors[1].max() == 19
    # A fine class lies in one coarse class.
    assert len(set(zip(fine.tensors[1].tolist(), coarse.tensors[1].tolist(), strict=True))) == 100


def test_mnist_gzipped_and_in_the_root(official: Callable[[str], Path], tmp_path: Path) -> None:
    root = official("mnist")
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / f"{name}.gz").write_bytes(
            gzip.compress((root / "MNIST" / "raw" / name).read_bytes(), 1)
        )
    packed, plain = load("mnist", "test", tmp_path), load("mnist", "test", root)
    assert all(torch.equal(a, b) for a, b in zip(packed.tensors, plain.tensors, strict=True))
    with pytest.raises(
        UserError, match=r"holds a part of the data set 'mnist', but train-images-idx3-ubyte"
    ):
        load("mnist", "train", tmp_path)


def test_python_batches(python_version: Path) -> None:
    expected = torch.from_numpy(np.load(python_version / "expected.npy")).view(20, 3, 32, 32)
    images, labels = load("cifar10", "train", python_version, dtype="uint8", limit=20).tensors
    assert torch.equal(images, expected)
    assert labels.tolist() == [n % 10 for n in range(20)]
    assert len(load("cifar10", "train", python_version, dtype="uint8", limit=10_001)) == 10_001
    assert load("cifar100", "test", python_version, limit=101).tensors[1][-1] == 0
    assert load("cifar100", "test", python_version, limit=21, labels="coarse").tensors[1].tolist()[
        -2:
    ] == [19, 0]


def test_the_data_sets_own_folder_as_root(python_version: Path) -> None:
    assert len(load("cifar10", "test", python_version / "cifar-10-batches-py", limit=3)) == 3


def test_a_missing_batch_is_named(python_version: Path) -> None:
    with pytest.raises(
        UserError, match="holds a part of the data set 'cifar100', but train is missing there"
    ):
        load("cifar100", "train", python_version)


def test_a_malicious_batch_is_refused(tmp_path: Path) -> None:
    folder, mark = tmp_path / "cifar-10-batches-py", tmp_path / "ran"
    folder.mkdir()
    padding = (
        b"cposix\nmkdir\n(U"
        + bytes([len(str(mark))])
        + str(mark).encode()
        + b"tR."
        + b"\0" * 31_000_000
    )
    (folder / "test_batch").write_bytes(padding)
    with pytest.raises(UserError, match=r"asks for posix\.mkdir"):
        load("cifar10", "test", tmp_path)
    assert not mark.exists()


DAMAGE = {
    "cut off": (30_729_999, 0, "30,729,999 bytes, but this file.*has 30,730,000: it is cut off"),
    "too long": (30_730_001, 0, "30,730,001 bytes.*too long, or not this file"),
    "empty": (0, 0, "0 bytes, but"),
    "wrong label": (30_730_000, 10, "record 0 has label 10, but labels go from 0 to 9"),
}


@pytest.mark.parametrize(("size", "label", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_binary_batch(tmp_path: Path, size: int, label: int, message: str) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    path = folder / "test_batch.bin"
    path.write_bytes(bytes([label]) * min(size, 1))
    os.truncate(path, size)
    with pytest.raises(UserError, match=rf"{path}.*{message}" if label == 0 else message):
        load("cifar10", "test", tmp_path)


def idx(*numbers: int) -> bytes:
    return b"\0\0\x08" + bytes([len(numbers)]) + b"".join(n.to_bytes(4, "big") for n in numbers)


IDX_DAMAGE = {
    "wrong magic": (b"\0\0\x09\x03" + idx(10_000, 28, 28)[4:], "begins with 00 00 09 03, but"),
    "labels instead of images": (idx(10_000), "begins with 00 00 08 01"),
    "empty": (b"", r"begins with nothing.*0 bytes, expected 7,840,016"),
    "another size": (idx(10_000, 32, 32), "10000 x 32 x 32 bytes, but MNIST has 10000 x 28 x 28"),
    "header cut off": (idx(10_000, 28, 28)[:9], "holds 10000 bytes, but MNIST has"),
    "cut off": (idx(10_000, 28, 28) + b"\0" * 100, r"has 116 bytes.*7,840,016: it is cut off"),
    "too long": (idx(10_000, 28, 28) + b"\0" * 7_840_001, "too long"),
}


@pytest.mark.parametrize(("data", "message"), IDX_DAMAGE.values(), ids=IDX_DAMAGE)
def test_damaged_idx(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(data)
    with pytest.raises(UserError, match=message):
        load("mnist", "test", tmp_path)


@pytest.mark.parametrize(
    "data",
    [b"no gzip", gzip.compress(idx(10_000, 28, 28) + b"\0" * 7_840_000, mtime=0)[:-20]],
    ids=["no gzip", "cut off"],
)
def test_damaged_gzip(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(data)
    with pytest.raises(UserError, match="cannot be unpacked"):
        load("mnist", "test", tmp_path)


def test_shakespeare(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLHANDS_DATA", str(shared_data))
    train, valid = load("shakespeare", block=64), load("shakespeare", "valid", block=64)
    x, y = train.tensors
    assert (x.shape, x.dtype) == (((1_003_854 - 1) // 64, 64), torch.int64)
    assert torch.equal(x[:, 1:], y[:, :-1])  # y is x one character on
    assert torch.equal(x[1:, 0], y[:-1, -1])  # also across blocks
    text = (shared_data / "tinyshakespeare.txt").read_text()
    assert "".join(VOCABULARY[token] for token in x[0]) == text[:64]
    assert (
        "".join(VOCABULARY[token] for token in valid.tensors[0][0])
        == text[1_003_854 : 1_003_854 + 64]
    )
    assert sorted(set(text)) == list(VOCABULARY)
    assert len(load("shakespeare")) == info("shakespeare").sizes["train"]
    assert len(load("shakespeare", limit=5)) == 5


def test_a_cut_off_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text("First Citizen:\n")
    with pytest.raises(UserError, match=r"input\.txt has 15 bytes.*1,115,394: it is cut off"):
        load("shakespeare", root=tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "shakespeare"])
def test_a_missing_data_set_says_where_it_comes_from(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALLHANDS_DATA", raising=False)
    with pytest.raises(UserError, match=f"{name!r} was not found: ALLHANDS_DATA is not set"):
        load(name)
    with pytest.raises(UserError) as error:
        load(name, root=tmp_path)
    assert str(tmp_path) in str(error.value)
    assert info(name).source in str(error.value)
    assert "ALLHANDS_DATA" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cifar-10"}, "did you mean 'cifar10'"),
        ({"name": "imagenet"}, "which holds digits, mnist, cifar10, cifar100, shakespeare"),
        (
            {"name": "digits", "split": "dev"},
            "split='dev'; it must be one of 'train', 'valid'",
        ),
        (
            {"name": "digits", "labels": "coarse"},
            "labels= does not belong to the data set 'digits'",
        ),
        ({"name": "digits", "dtype": "float16"}, "dtype='float16'; it must be"),
        ({"name": "digits", "dtype": "uint8", "normalize": True}, "normalize=True needs"),
        ({"name": "digits", "limit": 0}, "limit=0; it must be"),
        ({"name": "cifar100", "labels": "superclass"}, "labels='superclass'; it must be"),
        ({"name": "shakespeare", "block": -1}, "block=-1; it must be"),
        ({"name": "mnist", "root": "/no/such/folder"}, "root='/no/such/folder' is not a folder"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(**arguments)  # type: ignore[arg-type]


def test_names() -> None:
    assert names() == ("digits", "mnist", "cifar10", "cifar100", "shakespeare")
    assert info("cifar100").num_classes == 100

import io

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord

from allhands.errors import UserError
from allhands.federated.sites.arrays import BadUpdate, pack, unpack

ROW = {"row": (torch.float32, (8,))}


def bits(row):
    return row.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_rows_come_out_as_they_went_in(dtype):
    row = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    row[3], row[4], row[5] = -0.0, float("nan"), float("-inf")
    rows = {"row": row, "integers": torch.tensor([3, -(2**40)])}
    record = pack(rows)
    assert list(record) == ["row", "integers"]
    back = unpack(record, {"row": (dtype, (1000,)), "integers": (torch.int64, (2,))})
    assert [bits(back[name]) for name in rows] == [bits(rows[name]) for name in rows]


def test_a_row_that_is_mostly_zeros_travels_as_numbers_and_places():
    row = torch.zeros(10_000)
    row[::100], row[7] = 1.5, -0.0
    record = pack({"row": row})
    assert sorted(record) == ["row.places", "row.values"]
    assert sum(len(array.data) for array in record.values()) < 1200
    assert bits(unpack(record, {"row": (torch.float32, (10_000,))})["row"]) == bits(row)
    nothing = torch.zeros(64)
    assert bits(unpack(pack({"row": nothing}), {"row": (torch.float32, (64,))})["row"]) == bits(
        nothing
    )


@pytest.mark.parametrize("colours", [1, 2, 3, 256])
def test_a_row_of_few_different_numbers_travels_as_bytes_or_bits(colours):
    drawn = torch.Generator().manual_seed(1)
    row = torch.randint(colours, (5000,), generator=drawn).float() + 0.5
    row[4000:] *= -0.1
    record = pack({"row": row}, [0, 17, 4000, 5000])
    assert sorted(record) == ["row.bounds", "row.codes", "row.counts", "row.palette"]
    width = 5000 // 8 if colours <= 2 else 5000
    assert sum(len(array.data) for array in record.values()) < width + 4 * 3 * colours + 900
    assert bits(unpack(record, {"row": (torch.float32, (5000,))})["row"]) == bits(row)


def test_a_row_of_many_different_numbers_travels_as_it_is():
    for row in (torch.arange(600.0) + 1, torch.cat([torch.ones(5000), torch.arange(300.0)])):
        record = pack({"row": row}, [0, 300, len(row)])
        assert list(record) == ["row"]
        assert bits(unpack(record, {"row": (torch.float32, (len(row),))})["row"]) == bits(row)


def coded(codes, palette, counts, bounds):
    made = {
        "codes": np.array(codes, np.uint8),
        "palette": np.array(palette, np.float32),
        "counts": np.array(counts, np.int64),
    }
    return ArrayRecord(
        {
            f"row.{part}": Array(array)
            for part, array in {**made, "bounds": np.array(bounds, np.int64)}.items()
        }
    )


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (coded([0] * 8, [1, 2, 3], [3], [0, 7]), "the parts of 'row' do not make up 8 numbers"),
        (coded([0] * 8, [1, 2, 3], [3], [1, 8]), "the parts of 'row'"),
        (coded([0] * 8, [1, 2, 3], [2, 1], [0, 8, 8]), "the parts of 'row'"),
        (coded([0] * 8, [1, 2, 3], [3, 0], [0, 4, 8]), "the parts of 'row'"),
        (coded([0] * 8, [1, 2, 3], [-3, 6], [0, 4, 8]), "the parts of 'row'"),
        (coded([0] * 8, [1, 2, 3], [2**40], [0, 8]), "the parts of 'row'"),
        (coded([0] * 8, [], [], [8]), "the parts of 'row'"),
        (coded([0] * 8, [1, 2], [3], [0, 8]), r"'row.palette' is \[2\], and must be \[3\]"),
        (coded([0] * 8, [1, 2, 3], [3, 3], [0, 8]), r"'row.counts' is \[2\], and must be \[1\]"),
        (coded([0] * 7, [1, 2, 3], [3], [0, 8]), r"'row.codes' is \[7\], and must be \[8\]"),
        (coded([3] + [0] * 7, [1, 2, 3], [3], [0, 8]), "a code of 'row' is none of its palette's"),
        (coded([1], [1], [1], [0, 8]), "a code of 'row' is none of its palette's"),
        (
            coded([0], [1, 2, 3], [3], list(range(20))),
            "'row.bounds' is .20., and must be one row of at most 9",
        ),
    ],
)
def test_palettes_that_do_not_fit_are_refused(record, reason):
    with pytest.raises(BadUpdate, match=reason):
        unpack(record, ROW)


def test_what_comes_out_can_be_written_to():
    row = unpack(pack({"row": torch.ones(8)}), ROW)["row"].add_(1)
    assert row.tolist() == [2.0] * 8


def test_bfloat16_is_refused_by_name():
    with pytest.raises(
        UserError,
        match=r"'row' is torch.bfloat16, which cannot travel .* write model.to\(torch.float32\)",
    ):
        pack({"row": torch.ones(2, dtype=torch.bfloat16)})


def sparse(places, values=None, kind=np.int32):
    values = np.ones(len(places), np.float32) if values is None else values
    return ArrayRecord({"row.places": Array(np.array(places, kind)), "row.values": Array(values)})


def header(shape, data=b"", kind="<f4"):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"descr": kind, "fortran_order": False, "shape": shape}
    )
    return Array("float32", (1,), "numpy.ndarray", stream.getvalue() + data)


def pickled():
    stream = io.BytesIO()
    np.save(stream, np.array([{}] * 8, dtype=object), allow_pickle=True)
    return Array("object", (8,), "numpy.ndarray", stream.getvalue())


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (ArrayRecord(), "has no array 'row', it has none"),
        (ArrayRecord({"rows": Array(np.ones(8, np.float32))}), "has no array 'row', it has 'rows'"),
        (ArrayRecord({"row": Array(np.ones(9, np.float32))}), r"'row' is \[9\], and must be \[8\]"),
        (
            ArrayRecord({"row": Array(np.ones((2, 4), np.float32))}),
            r"'row' is \[2, 4\], and must be \[8\]",
        ),
        (ArrayRecord({"row": Array(np.ones(8))}), "'row' is float64, and must be float32"),
        (ArrayRecord({"row": Array(np.ones(8, ">f4"))}), "'row' is >f4, and must be float32"),
        (ArrayRecord({"row": pickled()}), "'row' is object, and must be float32"),
        (
            ArrayRecord({"row": Array("float32", (8,), "numpy.ndarray", b"")}),
            "cannot be read: 0 bytes",
        ),
        (
            ArrayRecord({"row": Array("float32", (8,), "numpy.ndarray", bytes(range(200)))}),
            "cannot be read: 200 bytes",
        ),
        (ArrayRecord({"row": Array("float32", (8,), "torch", b"")}), "is not one of NumPy's"),
        (ArrayRecord({"row": header((8,), b"1234")}), "cut off"),
        (ArrayRecord({"row": header((8,), bytes(40))}), "too long"),
        (ArrayRecord({"row": header((2**60,))}), "must be"),
        (
            ArrayRecord({"row": Array(np.ones(8, np.float32)), "more\n": Array(np.ones(1))}),
            "an array 'more[?]' that was not",
        ),
        (sparse([0, 8]), "places of 'row' do not rise from 0 to below 8"),
        (sparse([-1, 2]), "places of 'row' do not rise"),
        (sparse([3, 3]), "places of 'row' do not rise"),
        (sparse([5, 1]), "places of 'row' do not rise"),
        (sparse(range(9)), "'row.places' is .9., and must be one row of at most 8"),
        (sparse([1], kind=np.uint8), "'row.places' is uint8"),
        (sparse([1, 2], np.ones(1, np.float32)), r"'row.values' is \[1\], and must be \[2\]"),
        (sparse([1], np.ones(1)), "'row.values' is float64"),
    ],
)
def test_what_is_not_expected_is_refused_with_the_reason(record, reason):
    with pytest.raises(BadUpdate, match=reason):
        unpack(record, ROW)

"""`Jagged` holds the ids that it was given, in every form, and refuses parts that do not fit together."""

import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.errors import BatchError
from hotbed.jagged import Jagged


def jagged(**features):
    return Jagged.from_dict(features)


def lists(ids: Jagged) -> dict[str, list[list[int]]]:
    """The ids as plain lists, through per-feature views."""
    out = {}
    for name in ids.names:
        bags = ids[name]
        out[name] = [b.tolist() for b in bags.values.split(bags.lengths().tolist())]
    return out


bags = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=6)


@st.composite
def batches(draw):
    size = draw(st.integers(1, 6))
    bag = st.lists(st.integers(0, 99), max_size=4)
    return {
        "one": torch.tensor(draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))),
        "two": torch.tensor(
            draw(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=size, max_size=size))
        ),
        "many": draw(st.lists(bag, min_size=size, max_size=size)),
    }


def test_one_id_per_sample_needs_no_offsets():
    ids = jagged(a=torch.tensor([3, 4]), b=torch.tensor([[1, 2], [5, 6]]))
    assert ids.fixed == (1, 2)
    assert ids.offsets is None
    assert lists(ids) == {"a": [[3], [4]], "b": [[1, 2], [5, 6]]}


def test_fixed_and_ragged_features_mix():
    ids = jagged(a=torch.tensor([3, 4]), h=[[1, 2, 3], []], none=torch.empty(2, 0, dtype=torch.int64))
    assert ids.fixed == (1, None, 0)
    assert ids.starts == (0, 2, 5, 5)
    assert lists(ids) == {"a": [[3], [4]], "h": [[1, 2, 3], []], "none": [[], []]}
    assert "a" in ids and "b" not in ids


@given(batches())
def test_conversions_round_trip(features):
    ids = Jagged.from_dict(features)
    expected = lists(ids)
    assert lists(Jagged.from_dict(ids.to_dict())) == expected
    keys, values, lengths, weights = ids.to_keyed()
    assert weights is None
    assert lists(Jagged.from_keyed(keys, values, lengths)) == expected
    assert lists(Jagged.from_dict(ids.to_nested())) == expected


@given(batches(), st.data())
def test_take_and_concatenate_follow_lists(features, data):
    ids = Jagged.from_dict(features, {"many": torch.rand(sum(map(len, features["many"])))})
    pick = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=5))
    taken = ids.take(torch.tensor(pick, dtype=torch.int64))
    expected = lists(ids)
    assert lists(taken) == {name: [rows[i] for i in pick] for name, rows in expected.items()}
    joined = Jagged.concatenate([ids, taken])
    assert lists(joined) == {name: rows + lists(taken)[name] for name, rows in expected.items()}
    assert len(joined.weights) == len(joined.values)


def test_weights_follow_their_ids():
    ids = Jagged.from_dict({"a": torch.tensor([3, 4]), "h": [[1, 2], [7]]}, {"h": torch.tensor([0.1, 0.2, 0.7])})
    assert ids["a"].weights.tolist() == [1.0, 1.0]
    assert ids.take(torch.tensor([1]))["h"].weights.tolist() == pytest.approx([0.7])


def test_keyed_layout_is_that_of_keyed_jagged_tensor():
    ids = Jagged.from_keyed(["a", "b"], torch.tensor([1, 2, 3, 4]), torch.tensor([2, 0, 1, 1]))
    assert lists(ids) == {"a": [[1, 2], []], "b": [[3], [4]]}


def test_int32_stays_int32():
    assert jagged(a=torch.tensor([1], dtype=torch.int32)).values.dtype == torch.int32


ONE = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Jagged(["a", "a"], torch.arange(4), batch_size=2),
            r"got \['a', 'a'\], expected distinct names of features",
        ),
        (lambda: Jagged(["a"], ONE.float(), batch_size=2), r"got float32 \[2\], expected \[N\] of int32 or int64"),
        (lambda: Jagged(["a"], ONE, batch_size=3), r"got 2 ids, expected 3 for all features \(a: 3\)"),
        (lambda: Jagged(["a"], ONE, batch_size=2, fixed=[1, 1]), "got 2 entries, expected one for each of 1 features"),
        (
            lambda: Jagged(["a"], ONE, batch_size=2, fixed=[None]),
            r"got none, expected \[1, 3\] \(ragged features × batch size \+ 1\)",
        ),
        (
            lambda: Jagged(["a"], ONE, batch_size=2, offsets=torch.zeros(1, 3).long()),
            "offsets: expected none, because all features are fixed",
        ),
        (
            lambda: Jagged(["h"], ONE, batch_size=2, fixed=[None], offsets=torch.tensor([[0, 3, 2]])),
            "got 2 after 3 at sample 1, expected running totals of the ids per",
        ),
        (
            lambda: Jagged(["h"], ONE, batch_size=2, fixed=[None], offsets=torch.tensor([[1, 2, 2]])),
            "got 1, expected 0",
        ),
        (
            lambda: Jagged(["h"], ONE, batch_size=2, fixed=[None], offsets=torch.tensor([[0, 1, 2]]).int()),
            r"got int32 \[1, 3\], expected int64",
        ),
        (
            lambda: Jagged(["a"], ONE, batch_size=2, weights=torch.ones(3)),
            r"got float32 \[3\], expected floating point \[2\]",
        ),
        (lambda: Jagged(["a"], ONE, batch_size=2, weights=ONE), r"got int64 \[2\], expected floating point \[2\]"),
        (lambda: jagged(a=ONE, b=ONE.float()), r"got float32 \[2\], expected int32 or int64"),
        (lambda: jagged(a=(ONE.bool(), torch.tensor([0, 2]))), r"got bool \[2\], expected int32 or int64"),
        (
            lambda: jagged(a=(ONE, torch.tensor([0.0, 2.0]))),
            r"got float32 \[2\], expected \[B \+ 1\] of int32 or int64",
        ),
        (lambda: jagged(), "got none, expected at least one feature"),
        (lambda: jagged(a=ONE, b=torch.tensor([1])), "got 1 samples, expected 2 as in 'a'"),
        (lambda: jagged(a=torch.zeros(1, 2, 3).long()), r"got int64 \[1, 2, 3\], expected \[B\] or \[B, k\]"),
        (
            lambda: jagged(a=(ONE, torch.zeros(1, 1).long())),
            r"got int64 \[1, 1\], expected \[B \+ 1\] of int32 or int64",
        ),
        (lambda: Jagged.from_dict({"a": ONE}, {"b": ONE}), "feature in weights: got 'b', expected one of a"),
        (lambda: Jagged.from_dict({"a": ONE}, {"a": torch.ones(3)}), r"got 3 weights, expected one per id \(2\)"),
        (
            lambda: Jagged.from_keyed(["a", "b"], ONE, torch.tensor([1, 1, 1])),
            r"got int64 \[3\], expected \[2 keys × batch size\]",
        ),
        (lambda: Jagged.from_keyed(["a"], ONE, torch.tensor([3, -1])), "got -1 at sample 1, expected at least 0"),
        (lambda: Jagged.from_keyed(["a"], ONE, torch.tensor([1.0, 1.0])), "lengths .*got float32"),
        (
            lambda: Jagged.from_keyed(["a"], ONE, torch.tensor([[1], [1]])),
            r"got int64 \[2, 1\], expected \[1 keys × batch size\]",
        ),
        (
            lambda: Jagged.from_padded({"a": ONE[None]}, lengths={"a": torch.tensor([1.5])}),
            "feature 'a': lengths .*got float32",
        ),
        (
            lambda: Jagged.from_padded({"a": ONE[None]}, lengths={"a": torch.tensor([True])}),
            "feature 'a': lengths .*got bool",
        ),
        (lambda: jagged(item=ONE)["items"], "got 'items', expected one of item"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(make, message):
    with pytest.raises(BatchError, match=message):
        make()


@pytest.mark.parametrize("kind", [int, np.int8, np.int32, np.int64, np.uint16, np.uint64])
def test_lists_hold_integers_of_python_and_numpy(kind):
    ids = jagged(h=[[kind(3), 1], (), (kind(2),)], one=[kind(7), 8, kind(9)])
    assert ids.fixed == (None, 1)
    assert lists(ids) == {"h": [[3, 1], [], [2]], "one": [[7], [8], [9]]}
    assert ids.values.dtype == torch.int64


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint16", "uint64", ">i8"])
def test_arrays_are_taken_as_tensors_are(dtype):
    flat = np.array([5, 6, 7, 8], dtype=dtype)
    offsets = np.array([0, 3, 4, 4, 4], dtype="int32")
    features = {
        "one": flat,
        "two": np.stack([flat, flat], 1)[:, ::-1],
        "pair": (flat, offsets),
        "bags": [flat[:3], flat[3:], [], np.array([], dtype=dtype)],
        "tuple": (flat[:3], flat[3:], [], np.array([], dtype=dtype)),
        "objects": np.array([flat[:3], flat[3:], flat[:0], flat[:0]], dtype=object),
        "tensors": [torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([], dtype=torch.int64), []],
        "scalars": [torch.tensor(5), np.array(6), 7, 8],
    }
    ids = Jagged.from_dict(features)
    assert ids.fixed == (1, 2, None, None, None, None, None, 1)
    ragged = [[5, 6, 7], [8], [], []]
    assert lists(ids) == {
        "one": [[5], [6], [7], [8]],
        "two": [[5, 5], [6, 6], [7, 7], [8, 8]],
        **dict.fromkeys(("pair", "bags", "tuple", "objects", "tensors"), ragged),
        "scalars": [[5], [6], [7], [8]],
    }
    assert jagged(a=flat.astype("int32")).values.dtype == torch.int32
    flat[0] = 9
    assert ids["one"].values[0] == 5


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([[1], [2, 1.5]], "got 1.5 at sample 1, position 1, expected integers"),
        ([[], [np.float32(2)]], "got 2.0 at sample 1, position 0, expected integers"),
        ([[1], [True]], "got True at sample 1, position 0, expected integers"),
        ([[1], [np.True_]], "got True at sample 1, position 0, expected integers"),
        ([[1], ["x"]], "got 'x' at sample 1, position 0, expected integers"),
        ([[1], [None]], "got None at sample 1, position 0, expected integers"),
        ([[1], [[2]]], "got [2] at sample 1, position 0, expected integers"),
        ([[1], np.array([2.5])], "got 2.5 at sample 1, position 0, expected integers"),
        ([[1], [7, 1 << 63]], "got 9223372036854775808 at sample 1, position 1, expected a signed"),
        ([[1], [np.uint64(1 << 63)]], "got 9223372036854775808 at sample 1, position 0, expected a signed"),
        ([[1], [-(1 << 63) - 1]], "got -9223372036854775809 at sample 1, position 0, expected a signed"),
        ([3, 1 << 63], "got 9223372036854775808 at sample 1, expected a signed 64-bit integer"),
        ([[1], None], "got None at sample 1, expected a tensor, an array, or a list of one"),
        ([1, [2]], "got 1 at sample 0, expected a tensor, an array, or a list of one id"),
        ([1.5, 2], "got 1.5 at sample 0, expected a tensor, an array, or a list of one id"),
        ([True, False], "got True at sample 0, expected a tensor, an array, or a list of one"),
        ([[1], "23"], "got '23' at sample 1, expected a tensor, an array, or a list of one"),
        ("12", "got '12', expected a tensor, an array, or a list of one id or one"),
        (7, "got 7, expected a tensor, an array, or a list of one id or one list"),
        ({"a": 1}, "got {'a': 1}, expected a tensor, an array, or a list of one id or one"),
        ([[1], ["x" * 99]], "got '" + "x" * 56 + "… at sample 1, position 0"),
        (np.array([1.5, 2]), "got an array of float64 [2], expected integers"),
        (np.array([True, False]), "got an array of bool [2], expected integers"),
        (np.array(["a", "b"]), "got an array of <U1 [2], expected integers"),
        (
            np.array([[1, 2], [3, 1 << 63]], dtype="uint64"),
            "got 9223372036854775808 at position 1, expected a signed 64-bit",
        ),
        (np.zeros((2, 1, 1), dtype="int64"), "got int64 [2, 1, 1], expected [B] or [B, k]"),
        ((np.array([1]), np.array([0.0, 1.0])), "got an array of float64 [2], expected integers"),
    ],
)
def test_what_is_no_list_of_ids_is_refused_by_value_and_place(entry, message):
    with pytest.raises(BatchError, match=f"feature 'a': .*{re.escape(message)}"):
        jagged(a=entry)


@pytest.mark.parametrize("kind", [int, np.int64])
def test_lists_are_converted_without_a_call_for_each_id(kind):
    def calls(ids: int) -> int:
        entry, count = [[kind(i) for i in range(ids)], []], 0

        def counted(*_):
            nonlocal count
            count += 1

        sys.setprofile(counted)
        try:
            jagged(a=entry)
        finally:
            sys.setprofile(None)
        return count

    assert calls(2000) <= calls(1000) + 10


def test_the_largest_ids_are_kept():
    ends = [(1 << 63) - 1, -(1 << 63)]
    assert jagged(a=[ends]).values.tolist() == ends
    assert jagged(a=np.array(ends[:1], dtype="uint64")).values.tolist() == ends[:1]


def test_nested_tensors_with_holes_are_refused():
    values = torch.arange(10)
    holes = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 10]), lengths=torch.tensor([2, 3]))
    with pytest.raises(BatchError, match=r"got a nested tensor with gaps, e\.g\. from narrow, expected a"):
        jagged(a=holes)


def test_concatenating_weighted_and_plain_parts_fills_in_ones():
    plain, weighted = jagged(a=ONE), Jagged.from_dict({"a": ONE}, {"a": torch.tensor([0.5, 2.0])})
    assert Jagged.concatenate([plain, weighted]).weights.tolist() == [1.0, 1.0, 0.5, 2.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 3])])
    with pytest.raises(BatchError, match=r"got layout torch\.strided, expected torch\.jagged"):
        jagged(a=nested)


def test_padding_is_left_out():
    left = torch.tensor([[0, 0, 4], [0, 3, 1], [0, 0, 0]])
    assert lists(Jagged.from_padded({"a": left}, padding_id=0)) == {"a": [[4], [3, 1], []]}
    right, lengths = torch.tensor([[4, 9], [3, 1], [9, 9]], dtype=torch.int32), torch.tensor([1, 2, 0])
    assert lists(Jagged.from_padded({"a": right}, lengths={"a": lengths})) == {"a": [[4], [3, 1], []]}


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.ones(2, 2), {"padding_id": 0}, r"got float32 \[2, 2\], expected int32 or int64"),
        (
            torch.tensor([1]),
            {"padding_id": 0},
            r"got int64 \[1\], expected \[samples, length\], and lengths \[samples\]",
        ),
        (torch.tensor([[1]]), {"lengths": {"a": torch.tensor([1, 1])}}, r"with lengths int64 \[2\]"),
        (torch.tensor([[1]]), {"lengths": {"a": torch.tensor([2])}}, "got 2 to 2, expected 0 to 1, the padded length"),
        (torch.tensor([[1]]), {"lengths": {"b": torch.tensor([1])}}, "got b, expected also feature 'a'"),
        (torch.tensor([[1]]), {}, r"from_padded: expected either padding_id \(the id of padding\) or"),
        (
            torch.tensor([[1]]),
            {"padding_id": 0, "lengths": {}},
            r"from_padded: expected either padding_id \(the id of padding\) or",
        ),
    ],
)
def test_padded_ids_that_cannot_be(ids: torch.Tensor, options: dict, message: str):
    with pytest.raises(BatchError, match=message):
        Jagged.from_padded({"a": ids}, **options)

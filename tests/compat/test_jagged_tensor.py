"""Protects: tensors of hotbed.compat.torchrec are the lists that their keys, lengths and values describe."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx._pytree import tree_flatten_spec
from torch.utils import _pytree as pytree

import hotbed as hb
from hotbed.compat.torchrec import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    KTRegroupAsDict,
    jt_is_equal,
    kjt_is_equal,
)
from hotbed.errors import BatchError, SpecError

Lists = dict[str, list[list[int]]]
META = torch.device("meta")


@st.composite
def keyed_lists(draw: st.DrawFn, varies: bool = False) -> Lists:
    """Ids per key and sample. With ``varies``, keys have different numbers of samples."""
    keys = [f"k{i}" for i in range(draw(st.integers(1, 4)))]
    samples = draw(st.integers(1, 4))
    bag = st.lists(st.integers(0, 99), max_size=3)
    counts = {key: draw(st.integers(0, 4)) if varies else samples for key in keys}
    return {key: draw(st.lists(bag, min_size=n, max_size=n)) for key, n in counts.items()}


def keyed(lists: Lists, draw: Any = None, varies: bool = False, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """Build a batch; ids at its end belong to no sample, and each weight is a tenth of its id."""
    sizes = [len(bag) for bags in lists.values() for bag in bags]
    values = torch.tensor([x for bags in lists.values() for bag in bags for x in bag] + [7, 8], dtype=torch.int64)
    strides = [[len(bags)] for bags in lists.values()] if varies else None
    by_offsets = draw is not None and draw(st.booleans())
    where = (
        {"offsets": torch.tensor([0, *accumulate(sizes)], dtype=dtype)}
        if by_offsets
        else {"lengths": torch.tensor(sizes, dtype=dtype)}
    )
    return KeyedJaggedTensor(list(lists), values, values / 10, stride_per_key_per_rank=strides, **where)


def lists_of(batch: KeyedJaggedTensor) -> list[tuple[str, list[list[int]]]]:
    """Read each key by itself. Weights must have followed their ids."""
    parts = batch.split([1] * len(batch.keys()))
    read: list[tuple[str, list[list[int]]]] = []
    for part in parts:
        jagged = part.to_dict()[part.keys()[0]]
        assert torch.equal(jagged.values() / 10, jagged.weights())
        assert [t.tolist() for t in jagged.to_dense_weights() or []] == [(t / 10).tolist() for t in jagged.to_dense()]
        read.append((part.keys()[0], [bag.tolist() for bag in jagged.to_dense()]))
    return read


@pytest.mark.parametrize("varies", [False, True])
@given(st.data())
def test_batches_are_the_lists_that_lengths_describe(varies: bool, data: st.DataObject) -> None:
    lists = data.draw(keyed_lists(varies))
    batch = keyed(lists, data.draw, varies)
    expected = list(lists.items())
    sizes = [sum(map(len, bags)) for bags in lists.values()]
    assert lists_of(batch) == expected
    assert batch.length_per_key() == sizes and batch.offset_per_key() == [0, *accumulate(sizes)]
    assert batch.stride_per_key() == [len(bags) for bags in lists.values()]
    assert batch.index_per_key() == {key: i for i, key in enumerate(lists)}
    for key, bags in expected:
        assert [bag.tolist() for bag in batch[key].to_dense()] == bags
        assert batch.to_dict(compute_offsets=False)[key].offsets_or_none() is None
    assert batch.variable_stride_per_key() == varies
    if not varies:
        assert batch.stride() == len(expected[0][1])


@pytest.mark.parametrize("varies", [False, True])
@given(st.data())
def test_batches_are_cut_and_joined_as_lists_are(varies: bool, data: st.DataObject) -> None:
    lists = data.draw(keyed_lists(varies))
    batch, expected = keyed(lists, data.draw, varies), list(lists.items())
    picked = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=5))
    taken = batch.permute(picked)
    assert lists_of(taken) == [expected[i] for i in picked] and taken.keys() == [expected[i][0] for i in picked]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lists)), max_size=3)))
    segments = [b - a for a, b in zip([0, *cuts], [*cuts, len(lists)], strict=True)]
    parts, pairs = batch.split(segments), zip(segments, accumulate(segments), strict=True)
    assert [part.keys() for part in parts] == [list(lists)[b - n : b] for n, b in pairs]
    assert [pair for part in parts for pair in lists_of(part)] == expected
    assert all(part.stride() == batch.stride() for part in parts)
    assert lists_of(KeyedJaggedTensor.concat([part for part in parts if part.keys()])) == expected
    assert lists_of(KeyedJaggedTensor.from_jt_dict(batch.to_dict())) == expected
    assert lists_of(ComputeJTDictToKJT()(ComputeKJTToJTDict()(batch))) == expected


@given(keyed_lists(), st.integers(0, 4), st.booleans())
def test_padding_cuts_and_fills(lists: Lists, length: int, longest: bool) -> None:
    for key, bags in lists.items():
        jagged = keyed(lists)[key]
        length = max(map(len, bags)) if longest else length
        expected = [(bag + [-1] * length)[:length] for bag in bags]
        wanted = None if longest else length
        assert jagged.to_padded_dense(wanted, -1).tolist() == expected
        weights = jagged.to_padded_dense_weights(wanted, -0.1)
        assert weights is not None
        torch.testing.assert_close(weights, torch.tensor(expected).view(len(bags), length) / 10)


def test_a_part_without_keys_has_the_samples() -> None:
    none, both = keyed({"a": [[1, 2], []], "b": [[3], [4]]}).split([0, 2])
    assert none.keys() == [] and none.stride() == 2 and none.to_dict() == {}
    assert none.values().tolist() == [] and none.lengths().tolist() == [] and none.weights().tolist() == []
    assert both.keys() == ["a", "b"] and both.stride() == 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_have_the_dtype_of_lengths(dtype: torch.dtype) -> None:
    batch = keyed({"a": [[1, 2], []], "b": [[3], [4]]}, dtype=dtype)
    assert batch.offsets().dtype == dtype and batch["a"].offsets().dtype == dtype
    assert batch.to_dict()["b"].offsets().dtype == dtype


def test_lengths_of_dense_values_are_int32() -> None:
    jagged = JaggedTensor.from_dense([torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0])])
    assert jagged.lengths().dtype == jagged.offsets().dtype == torch.int32
    assert jagged.offsets().tolist() == [0, 1, 1, 3]


@pytest.mark.parametrize("name", ["lengths", "offsets"])
def test_lengths_and_offsets_that_are_not_integers_are_refused(name: str) -> None:
    given_ = {name: torch.tensor([0.0, 1.5])}
    with pytest.raises(BatchError, match=f"{name} .*got float32"):
        JaggedTensor(torch.arange(2), **given_)
    with pytest.raises(BatchError, match=f"{name} .*got float32"):
        KeyedJaggedTensor(["a"], torch.arange(2), **given_)
    with pytest.raises(BatchError, match=r"lengths .*got float32"):
        hb.Jagged.from_keyed(["a"], torch.arange(3), torch.tensor([1.0, 2.0]))


def test_collections_read_the_values_of_their_samples() -> None:
    tables = [EmbeddingBagConfig(100, 4, key, feature_names=[key]) for key in ("a", "b")]
    ebc = EmbeddingBagCollection(tables, is_weighted=True)
    lists = {"a": [[1, 2], []], "b": [[3], [4, 5]]}
    batch = keyed(lists)
    exact = KeyedJaggedTensor(["a", "b"], batch.values()[:5], batch.weights()[:5], batch.lengths())
    assert torch.equal(ebc(batch).values(), ebc(exact).values())
    square = KeyedJaggedTensor(["a", "b"], batch.values(), batch.weights(), batch.lengths().view(2, 2))
    assert torch.equal(ebc(square).values(), ebc(exact).values())
    assert torch.equal(square.flatten_lengths().lengths(), batch.lengths())
    with pytest.raises(BatchError, match="batch sizes that differ by key"):
        ebc(keyed({"a": [[1]], "b": [[2], []]}, varies=True))
    with pytest.raises(BatchError, match="inverse indices"):
        inverse = (["a", "b"], torch.tensor([[0, 0, 1], [0, 1, 1]]))
        ebc(KeyedJaggedTensor(["a", "b"], exact.values(), exact.weights(), exact.lengths(), inverse_indices=inverse))


def test_keyed_parts_are_read_as_far_as_lengths_go() -> None:
    values, lengths = torch.tensor([5, 6, 7, 8]), torch.tensor([[2, 0], [1, 0]])
    ids = hb.Jagged.from_keyed(["a", "b"], values, lengths, torch.rand(9))
    assert ids["a"].values.tolist() == [5, 6] and ids["b"].values.tolist() == [7]
    assert ids.weights is not None and len(ids.weights) == 3
    with pytest.raises(BatchError, match="got 4 ids, expected 5"):
        hb.Jagged.from_keyed(["a", "b"], values, torch.tensor([2, 0, 1, 2]))
    assert len(hb.Jagged.from_keyed(["a"], values[:0], torch.tensor([]))) == 0


def test_what_is_known_of_a_batch_is_said_without_computing() -> None:
    batch = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 0, 2, 0]))
    assert batch.offsets_or_none() is None and batch.length_per_key_or_none() is None
    assert batch.sync().length_per_key_or_none() == [1, 2] and batch.offset_per_key_or_none() == [0, 1, 3]
    assert batch.lengths_offset_per_key() == [0, 2, 4] and batch.stride_per_key_per_rank() == []
    assert batch.unsync().length_per_key_or_none() is None and batch.offset_per_key_or_none() is None
    assert batch.offsets().tolist() == [0, 1, 1, 3, 3] and batch.offsets_or_none() is not None
    by_offsets = KeyedJaggedTensor(["a", "b"], torch.arange(3), offsets=batch.offsets())
    assert by_offsets.lengths_or_none() is None and by_offsets.lengths().tolist() == [1, 0, 2, 0]
    for make in (KeyedJaggedTensor.from_lengths_sync, KeyedJaggedTensor.from_offsets_sync):
        tensor = batch.lengths() if make == KeyedJaggedTensor.from_lengths_sync else batch.offsets()
        assert make(["a", "b"], torch.arange(3), tensor).length_per_key_or_none() == [1, 2]
        assert make(["a", "b"], torch.arange(3), tensor, None, 2).stride() == 2
    assert KeyedJaggedTensor([], torch.tensor([])).stride() == 0
    on_meta = KeyedJaggedTensor(["a", "b"], torch.empty(5, device=META), lengths=torch.empty(4, device=META).int())
    assert KeyedJaggedTensor.empty(device="meta").sync().length_per_key() == []
    assert on_meta.sync().length_per_key() == [3, 2] and on_meta["b"].values().shape == (2,)


@pytest.mark.parametrize("kind", [JaggedTensor, KeyedJaggedTensor])
def test_empty_tensors(kind: Any) -> None:
    empty = kind.empty(is_weighted=True, values_dtype=torch.int64, weights_dtype=torch.float64)
    dtypes = [t.dtype for t in (empty.values(), empty.weights(), empty.lengths())]
    assert dtypes == [torch.int64, torch.float64, torch.int32] and len(empty.values()) == 0
    assert kind.empty(device="meta").device() == META and kind.empty().weights_or_none() is None
    batch = keyed({"a": [[1, 2], []]})
    given_ = batch["a"] if kind is JaggedTensor else batch
    like, there = kind.empty_like(given_), kind.empty_like(given_, device="meta")
    assert like.values().dtype == torch.int64 and like.lengths().numel() == like.weights().numel() == 0
    assert there.device() == META and there.values().shape == given_.values().shape
    if kind is KeyedJaggedTensor:
        assert like.keys() == [] and like.stride() == 2 and there.keys() == ["a"]


def test_copies_of_a_batch() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(4),
        torch.rand(4),
        torch.tensor([2, 0, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 1], [0, 0]])),
    )
    for same in (batch.to("cpu"), batch.to(device=torch.device("cpu"), non_blocking=True)):
        assert kjt_is_equal(same, batch) and same.stride_per_key_per_rank() == [[2], [1]]
        assert torch.equal(same.inverse_indices()[1], batch.inverse_indices()[1])
    half = batch.to(dtype=torch.float16)
    assert half.weights().dtype == torch.float16 and half.values().dtype == torch.int64
    target = KeyedJaggedTensor.empty_like(batch, device="cpu")
    assert target.copy_(batch) is target and kjt_is_equal(target, batch)
    assert batch.size_in_bytes() == 4 * 8 + 4 * 4 + 3 * 8 + 4 * 8 + 2 * 4  # offsets were computed
    jagged = batch["a"]
    other = JaggedTensor.empty_like(jagged, device="cpu").copy_(jagged)
    assert jt_is_equal(other, jagged) and jagged.size_in_bytes() == 2 * 8 + 2 * 4 + 2 * 8 + 3 * 8
    assert not jt_is_equal(other, batch) and not kjt_is_equal(batch, jagged)
    assert not kjt_is_equal(batch, KeyedJaggedTensor(["a"], batch.values(), lengths=batch.lengths()))


@pytest.mark.parametrize(
    "tree",
    [
        JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2])),
        keyed({"a": [[1, 2], []], "b": [[3], [4]]}),
        keyed({"a": [[1, 2], []], "b": [[3]]}, varies=True),
    ],
)
def test_tensors_are_trees_to_torch(tree: Any) -> None:
    leaves, spec = pytree.tree_flatten({"batch": tree})
    assert all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, spec)["batch"]
    is_equal: Any = jt_is_equal if isinstance(tree, JaggedTensor) else kjt_is_equal
    assert type(again) is type(tree) and is_equal(again, tree)
    doubled = pytree.tree_map_only(Tensor, lambda t: t * 1, tree)
    assert torch.equal(doubled.values(), tree.values())
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    assert paths[:4] == ["._values", "._weights", "._lengths", "._offsets"]
    assert tree_flatten_spec(tree, pytree.tree_flatten(tree)[1])[0] is tree.values()


def test_vectors_are_a_tree_to_torch() -> None:
    parts = [torch.rand(2, 1), torch.rand(2, 3)]
    vectors = KeyedTensor.from_tensor_list(["a", "b"], parts)
    leaves, spec = pytree.tree_flatten(vectors)
    again = pytree.tree_unflatten(leaves, spec)
    assert leaves[0] is vectors.values() and again.keys() == ["a", "b"] and torch.equal(again["b"], parts[1])
    turned = KeyedTensor.from_tensor_list(["b", "a"], parts[::-1])
    assert torch.equal(tree_flatten_spec(turned, spec)[0], vectors.values())
    down = KeyedTensor.from_tensor_list(["a", "b"], [torch.rand(1, 2), torch.rand(3, 2)], key_dim=0, cat_dim=0)
    assert pytree.tree_map(lambda t: t, down).key_dim() == 0


def test_vectors_side_by_side_or_one_below_the_other() -> None:
    for dim in (0, 1):
        parts = [torch.rand(2, 2).narrow(dim, 0, 1), torch.rand(2, 2)]
        vectors = KeyedTensor.from_tensor_list(["a", "b"], parts, key_dim=dim, cat_dim=dim)
        assert vectors.key_dim() == dim and vectors.length_per_key() == [1, 2] and vectors.offset_per_key() == [0, 1, 3]
        assert torch.equal(vectors["b"], parts[1]) and torch.equal(vectors.to_dict()["a"], parts[0])
        assert vectors.to("meta").device() == META and vectors.to("cpu").key_dim() == dim
        ba = KeyedTensor.regroup_as_dict([vectors], [["b", "a"], ["a"]], ["both", "one"])
        assert torch.equal(ba["both"], torch.cat(parts[::-1], dim)) and torch.equal(ba["one"], parts[0])
        assert vectors.size_in_bytes() == 6 * 4


def test_gradients_reach_all_values() -> None:
    first = KeyedTensor.from_tensor_list(["a", "b"], [torch.rand(2, 1, requires_grad=True), torch.rand(2, 2)])
    second = KeyedTensor(["c"], [2], torch.rand(2, 2, requires_grad=True))
    groups = KTRegroupAsDict([["b", "a", "a"], ["c", "a"]], ["x", "y"])([first, second])
    loss = groups["x"].sum() + 2 * groups["y"].sum()
    grads = torch.autograd.grad(loss, [first.values(), second.values()])
    assert grads[0].tolist() == [[4, 1, 1]] * 2 and grads[1].tolist() == [[2, 2]] * 2
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "t", feature_names=["f", "g"])])
    found = ebc(KeyedJaggedTensor(["f", "g"], torch.arange(2), lengths=torch.tensor([1, 1])))
    assert torch.equal(found["g"], found.to_dict()["g"])
    assert torch.autograd.grad(found.values()[0, 3] + found["g"][0, 1], found.values())[0].tolist() == [[0, 0, 0, 2]]


def test_groups_have_the_dtype_that_is_asked_for() -> None:
    vectors = KeyedTensor.from_tensor_list(["a", "b"], [torch.rand(2, 1), torch.rand(2, 2)])
    groups = KTRegroupAsDict([["b", "a"]], ["x"], emb_dtype=DataType.BF16)([vectors])
    assert torch.equal(groups["x"], torch.cat([vectors["b"], vectors["a"]], 1).bfloat16())


def test_text() -> None:
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 0, 1]))
    assert str(batch) == 'KeyedJaggedTensor({\n    "a": [[1, 2], []],\n    "b": [[], [3]]\n})\n'
    weighted = KeyedJaggedTensor(["a"], torch.tensor([1, 2]), torch.tensor([0.5, 2]), torch.tensor([2, 0]))
    assert '"a": {\n        "values": [[1, 2], []],\n        "weights": [[0.5, 2.0], []]\n    }' in str(weighted)
    assert str(weighted["a"]) == 'JaggedTensor({\n    "values": [[1, 2], []],\n    "weights": [[0.5, 2.0], []]\n})\n'
    assert str(batch["b"]) == "JaggedTensor({\n    [[], [3]]\n})\n"
    assert str(KeyedJaggedTensor.empty()) == "KeyedJaggedTensor()\n"
    assert str(KeyedTensor([], [], torch.tensor([]))) == "KeyedTensor()\n"
    vectors = KeyedTensor.from_tensor_list(["a", "b"], [torch.tensor([[1, 2]]), torch.tensor([[3]])])
    assert str(vectors) == 'KeyedTensor({\n    "a": [[1, 2]],\n    "b": [[3]]\n})\n'


ONE = keyed({"a": [[1, 2], []]})
PLAIN = KeyedJaggedTensor(["b"], torch.arange(3), lengths=torch.tensor([1, 2]))
VECTORS = KeyedTensor(["a"], [2], torch.rand(1, 2))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: JaggedTensor.from_dense_lengths(torch.rand(2, 3), torch.tensor([4, 2])),
            BatchError,
            "got 4, expected at most 3",
        ),
        (lambda: ONE.split([1, 1]), BatchError, r"got \[1, 1\], expected a sum of at most 1"),
        (lambda: KeyedJaggedTensor.concat([]), BatchError, "got an empty list"),
        (lambda: KeyedJaggedTensor.concat([ONE, PLAIN]), BatchError, "only some .* have weights"),
        (
            lambda: KeyedJaggedTensor.concat(
                [PLAIN, KeyedJaggedTensor(["c"], torch.arange(1), lengths=torch.tensor([1]))]
            ),
            BatchError,
            r"numbers of samples differ: got \[2, 1\]",
        ),
        (lambda: PLAIN.inverse_indices(), BatchError, "no inverse indices"),
        (
            lambda: KeyedJaggedTensor(["a"], torch.arange(1), lengths=torch.tensor([1, 2])).to_dict(),
            BatchError,
            "values: got 1, expected at least the sum of the lengths 3",
        ),
        (
            lambda: KeyedJaggedTensor(
                ["a", "b"], torch.arange(3), lengths=torch.tensor([1, 1, 1]), stride_per_key_per_rank=[[1], [1]]
            ).sync(),
            BatchError,
            r"got \[1, 1\] samples by key, expected 2 keys with 3 samples",
        ),
        (
            lambda: str(JaggedTensor(torch.rand(1, 1, 1), lengths=torch.tensor([1]))),
            BatchError,
            r"got float32 \[1, 1, 1\]",
        ),
        (lambda: pytree.tree_flatten(ONE)[1].unflatten([None] * 9), ValueError, "9"),
        (lambda: KeyedTensor.regroup([VECTORS], [["b"]]), BatchError, r"'b': got 0 .*\['a'\]"),
        (lambda: KeyedTensor.regroup([VECTORS, VECTORS], [["a"]]), BatchError, "'a': got 2"),
        (lambda: KeyedTensor.regroup_as_dict([VECTORS], [["a"]], []), SpecError, "got 0 keys for 1 groups"),
        (lambda: KTRegroupAsDict([["a"]], ["x", "y"]), SpecError, "got 2 keys for 1 groups"),
        (
            lambda: KTRegroupAsDict([["a"]], ["x"], emb_dtype=DataType.INT8),
            SpecError,
            "got 'INT8', expected one of FP32",
        ),
        (lambda: KTRegroupAsDict([["a"]], ["x"])([]), BatchError, "got an empty list"),
        (
            lambda: KTRegroupAsDict([["a"]], ["x"])([VECTORS, KeyedTensor(["b"], [1], torch.rand(1, 2), 0)]),
            BatchError,
            r"key_dim of keyed_tensors: got \[0, 1\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()

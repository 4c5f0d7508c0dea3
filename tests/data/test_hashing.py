import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data.hashing import hash_integers, hash_strings, hashes_to_rows, mix

MASK = 2**64 - 1


def plain_mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_string(text: bytes) -> int:
    h = plain_mix(len(text))
    for at in range(0, len(text), 8):
        h = plain_mix(h ^ int.from_bytes(text[at : at + 8], "little"))
    return h


def hashes(texts: list[bytes]) -> list[int]:
    offsets = np.cumsum([0, *map(len, texts)])
    return hash_strings(offsets, np.frombuffer(b"".join(texts), dtype=np.uint8)).tolist()


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_strings_against_plain_python(texts: list[bytes]) -> None:
    assert hashes(texts) == [plain_string(t) for t in texts]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8))
def test_integers_against_plain_python(values: list[int]) -> None:
    assert hash_integers(np.array(values, dtype=np.int64)).tolist() == [plain_mix(v & MASK) for v in values]


def test_values_that_must_never_change() -> None:
    """Models are trained on these rows: a change of one number here breaks every checkpoint."""
    assert mix(np.array([0, 1], dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    assert hashes_to_rows(hash_integers(np.array([0, 1, -1, 10**12])), 1000).tolist() == [737, 546, 459, 980]
    texts = [b"", b"a", b"item-17", "caf\u00e9 au lait".encode()]
    assert hashes_to_rows(np.array(hashes(texts), dtype=np.uint64), 1000).tolist() == [737, 348, 883, 47]


def test_integers_hash_alike_in_all_widths() -> None:
    for dtype in (np.int8, np.int16, np.int32, np.uint8, np.uint64):
        assert hash_integers(np.array([7], dtype=dtype)) == hash_integers(np.array([7]))


def test_rows_are_even_and_leave_row_0() -> None:
    rows = hashes_to_rows(hash_integers(np.arange(99_000)), 100)
    counts = np.bincount(rows, minlength=100)
    assert counts[0] == 0
    assert 800 < counts[1:].min() <= counts.max() < 1200

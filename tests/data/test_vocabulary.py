from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.data.vocabulary import Vocabulary
from hotbed.errors import DataError

days = st.lists(st.dictionaries(st.integers(0, 2**32 - 1) | st.integers(0, 9), st.integers(1, 5)), max_size=4)


def extended(vocabulary: Vocabulary, day: dict[int, int], threshold: int) -> Vocabulary:
    values = np.array(list(day), dtype=np.uint32)
    return vocabulary.extended(values, np.array(list(day.values()), dtype=np.uint32), threshold)


@settings(deadline=None)
@given(days=days, threshold=st.integers(1, 4))
def test_ids_never_change_as_days_are_added(days: list[dict[int, int]], threshold: int) -> None:
    vocabulary, ids = Vocabulary.empty(), {}
    for day in days:
        vocabulary = extended(vocabulary, day, threshold)
        new = sorted((v for v, n in day.items() if n >= threshold and v not in ids), key=lambda v: (-day[v], v))
        ids |= {v: len(ids) + 1 + i for i, v in enumerate(new)}
        asked = np.array([*ids, *day, 77], dtype=np.uint32)
        assert vocabulary.lookup(asked).tolist() == [ids.get(int(v), 0) for v in asked]
        assert vocabulary.rows == len(ids) + 1


@settings(deadline=None)
@given(days=days)
def test_files_are_append_only(days: list[dict[int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("vocabulary") / "C1.txt"
    vocabulary, before = Vocabulary.empty(), b""
    for day in days:
        vocabulary = extended(vocabulary, day, 1)
        vocabulary.save(path)
        assert path.read_bytes().startswith(before)
        before = path.read_bytes()
        assert Vocabulary.load(path).values.tolist() == vocabulary.values.tolist()


def test_text(tmp_path: Path) -> None:
    Vocabulary(np.array([0x68FD1E64, 5], dtype=np.uint32)).save(tmp_path / "C1.txt")
    assert (tmp_path / "C1.txt").read_text() == "68fd1e64\n00000005\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("68fd1e64\n5\n", "every line must be 8 hexadecimal digits"),
        ("68fd1e64\n0000000g\n", "every line must be 8 hexadecimal digits"),
        ("68fd1e64", "every line must be 8 hexadecimal digits"),
        ("68fd1e64\n\u00e9\n", "every line must be 8 hexadecimal digits"),
        ("68fd1e64\n68fd1e64\n", "a value occurs twice"),
    ],
)
def test_damaged_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "C1.txt").write_text(text)
    with pytest.raises(DataError, match=rf"C1.txt is damaged: {message}"):
        Vocabulary.load(tmp_path / "C1.txt")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"C1.txt does not exist; give the `vocabulary` directory"):
        Vocabulary.load(tmp_path / "C1.txt")

"""Protects: what docs/moving_in.md shows runs as it stands, and the commands that it names exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hotbed.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "moving_in.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("number", range(4))
def test_the_examples_run(number: int) -> None:
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[number], names)
    assert not any(torch.isnan(t).any() for t in names["model"].state_dict().values())


def test_tables_of_tensorflow_become_npy_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for TensorFlow, which is not installed."""
    variables = {"emb/user": np.ones((5, 4), np.float32)}
    train = SimpleNamespace(load_checkpoint=lambda _: SimpleNamespace(get_tensor=variables.__getitem__))
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(train=train))
    names = _names_of_the_page("tensorflow")
    names["export_tables"]("model", tmp_path, {"user": "emb/user"})
    assert np.array_equal(np.load(tmp_path / "user.npy"), variables["emb/user"])


def test_keys_and_vectors_of_hugectr_are_read(tmp_path: Path) -> None:
    """Protects against vectors in the rows of other keys; the files are as HugeCTR's documentation describes them."""
    keys, vectors = np.array([1 << 40, 2, 9]), np.arange(12, dtype=np.float32).reshape(3, 4)
    keys.tofile(tmp_path / "key")
    vectors.tofile(tmp_path / "emb_vector")
    found = _names_of_the_page("read_hugectr")["read_hugectr"](tmp_path)
    assert np.array_equal(found[0], keys) and np.array_equal(found[1], vectors)


@pytest.mark.parametrize("missing", [-1, 3, 8])  # below all keys, between two, above all
def test_ids_without_a_key_are_refused(missing: int) -> None:
    rows_of = _names_of_the_page("rows_of")["rows_of"]
    assert rows_of(np.array([7, 0, 2, 7]), np.array([7, 0, 2])).tolist() == [2, 0, 1, 2]
    with pytest.raises(ValueError, match="some ids have no key"):
        rows_of(np.array([7, missing]), np.array([7, 0, 2]))


def _names_of_the_page(word: str) -> dict[str, Any]:
    """Run the example that contains the word; return its names."""
    names: dict[str, Any] = {}
    exec(next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if word in code), names)
    return names


def test_all_examples_are_run() -> None:
    assert PAGE.count("```python\n") == 4


def test_the_formats_that_are_named_can_be_converted(capsys: pytest.CaptureFixture[str]) -> None:
    main(["checkpoint", "convert", "--help"])
    known = capsys.readouterr().out
    for name in re.findall(r"--from (\w+)", PAGE):
        assert name in known

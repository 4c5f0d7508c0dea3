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

from hotbed.commands.main import main

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
    names: dict[str, Any] = {}
    exec(next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "tensorflow" in code), names)
    names["export_tables"]("model", tmp_path, {"user": "emb/user"})
    assert np.array_equal(np.load(tmp_path / "user.npy"), variables["emb/user"])


def test_all_examples_are_run() -> None:
    assert PAGE.count("```python\n") == 4


def test_the_formats_that_are_named_can_be_converted(capsys: pytest.CaptureFixture[str]) -> None:
    main(["checkpoint", "convert", "--help"])
    known = capsys.readouterr().out
    for name in re.findall(r"--from (\w+)", PAGE):
        assert name in known

"""Protects: what docs/moving_in.md shows runs as it stands, and the commands that it names exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbed.commands.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "moving_in.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("number", range(3))
def test_the_examples_run(number: int) -> None:
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[number], names)
    assert not any(torch.isnan(t).any() for t in names["model"].state_dict().values())


def test_all_examples_are_run() -> None:
    assert PAGE.count("```python\n") == 3


def test_the_formats_that_are_named_can_be_converted(capsys: pytest.CaptureFixture[str]) -> None:
    main(["checkpoint", "convert", "--help"])
    known = capsys.readouterr().out
    for name in re.findall(r"--from (\w+)", PAGE):
        assert name in known

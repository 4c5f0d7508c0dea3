"""Protects that a model is one class of fewer than 80 lines in a file of its own, and that docs/models.md has it."""

import inspect
import re
from pathlib import Path

import pytest
from torch import nn

import hotbed as hb

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MODELS = [name for name in hb.nn.__all__ if "tables" in inspect.signature(getattr(hb.nn, name)).parameters]


def lines_of(kind: type[nn.Module]) -> int:
    return len(inspect.getsource(kind).splitlines())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "NextItem"])
def test_a_model_is_a_short_class_in_a_file_of_its_own(name: str) -> None:
    kind = getattr(hb.nn, name)
    assert lines_of(kind) < 80
    file = inspect.getsourcefile(kind)
    assert file is not None
    assert re.findall(r"^class (\w+)", Path(file).read_text(encoding="utf-8"), flags=re.MULTILINE) == [name]


def test_the_page_has_every_model() -> None:
    names = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(names) == sorted(name for name in MODELS if name != "NextItem")

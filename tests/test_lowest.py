"""What `make test-lowest` installs is the oldest that pyproject.toml allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHERS = {"torch", "triton"}
"""Not from PyPI's own wheels: torch is named by the Makefile, triton comes with it."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lowest_constraints_are_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    bounds: dict[str, str] = {}
    for requirement in [
        *project["dependencies"],
        *(r for name in ("tensorboard", "plot", "interpret", "tune") for r in extras[name]),
    ]:
        found = re.match(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)", requirement)
        assert found, f"{requirement} has no lower bound"
        bounds[normal(found[1])] = found[2]
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert [normal(name) for name in pinned] == sorted(bounds.keys() - OTHERS)
    for name, version in pinned.items():
        low = bounds[normal(name)].split(".")
        assert version.split(".") == low + ["0"] * (3 - len(low))

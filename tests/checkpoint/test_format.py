"""The format is what docs/checkpoint-format.md says, and the reader there reads it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hotbed.checkpoint import save_checkpoint
from hotbed.embed import EmbeddingCollection
from hotbed.specs import Feature, Table
from tests.checkpoint.damage import flip_last_bit
from tests.checkpoint.test_checkpoint import narrow_model
from tests.checkpoint.tiles import Tiles, save

DOCS = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


def reader() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    return code


def read_table(checkpoint: Path) -> Any:
    """Read a table with the functions of the docs."""
    namespace: dict[str, Any] = {}
    exec(reader().rsplit("\n\n", 1)[0], namespace)
    return namespace["read_table"](checkpoint, "t")


WHOLE = [(range(37), range(32))]
CUTS = [(range(k, 37, 2), range(c, c + 16)) for k in (0, 1) for c in (0, 16)]


@pytest.mark.parametrize(("cuts", "ranks"), [(WHOLE, 1), (CUTS, 2)])
def test_the_reader_in_the_docs_reads_any_tiles_and_a_difference_on_its_base(
    tmp_path: Path, cuts: Any, ranks: int
) -> None:
    tiles = Tiles(Table("t", 37, 32), cuts)
    tiles.fill(3)
    save(tmp_path / "base", tiles, ranks=ranks)
    assert np.array_equal(read_table(tmp_path / "base"), tiles.values()["rows"].numpy())
    for tile in tiles.tiles:
        tile.arena.store.track("base")
    tiles.fill(4, [1, 5, 30])
    save(tmp_path / "d", tiles, base="base")
    assert np.array_equal(read_table(tmp_path / "d"), tiles.values()["rows"].numpy())
    values = json.loads((tmp_path / "d" / "manifest.json").read_text(encoding="ascii"))
    assert list(values)[:3] == ["format", "base", "step"] and values["format"] == 1
    base = json.loads((tmp_path / "base" / "manifest.json").read_text(encoding="ascii"))
    assert values["base"] == {"name": "base", "sha256": base["sha256"]}


def test_the_reader_is_a_program_without_hotbed_and_of_thirty_lines(tmp_path: Path) -> None:
    model = EmbeddingCollection([Table("users", 5, 4)], [Feature("user", table="users")])
    save_checkpoint(tmp_path / "c", {"model": model})
    code = reader()
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    assert "hotbed" not in code
    (tmp_path / "read.py").write_text(code)
    command = [sys.executable, "-I", str(tmp_path / "read.py"), str(tmp_path / "c"), "users"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{model.weight('users').numpy()}\n"
    file = tmp_path / "c" / "tables-00000-00000.safetensors"
    flip_last_bit(file)
    broken = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "block 0 has changed" in broken.stderr


def test_the_bytes_are_as_described(tmp_path: Path) -> None:
    model, optimizer = narrow_model()
    save_checkpoint(tmp_path / "c", {"model": model, "sparse": optimizer}, step=7, recipe={"name": "é"})
    text = (tmp_path / "c" / "manifest.json").read_text(encoding="ascii")
    values = json.loads(text)
    assert list(values) == ["format", "base", "step", "recipe", "plan", "tables", "files", "parts", "sha256"]
    digest = values.pop("sha256")
    assert hashlib.sha256(json.dumps(values, indent=1).encode()).hexdigest() == digest
    assert (values["format"], values["base"], values["step"]) == (1, None, 7)
    table = values["tables"]["word"]
    assert list(table) == ["name", "rows", "dim", "dtype", "fp32_rows", "init", "moments", "tiles"]
    assert (table["dtype"], table["fp32_rows"], table["rows"], table["dim"]) == ("int8", 2, 20, 12)
    assert table["init"] == {"seed": Table("word", 20, 12).seed(0), "bound": 20**-0.5, "version": 1}
    assert table["moments"]["exp_avg"] == {"per": "element", "initial": 0.0, "optimizer": "sparse", "rule": "adam"}
    (tile,) = table["tiles"]
    assert (tile["rows"], tile["cols"]) == ([0, 20, 1], [0, 12])
    for name, entry in values["files"].items():
        data = (tmp_path / "c" / name).read_bytes()
        assert entry["bytes"] == len(data)
        assert entry["sha256"] == [hashlib.sha256(data).hexdigest()]  # one block
        size = int.from_bytes(data[:8], "little")
        assert (8 + size) % 64 == 0
        header = json.loads(data[8 : 8 + size])
        ends = [0]
        for of in header.values():
            assert of["data_offsets"][0] == ends[-1]
            ends.append(of["data_offsets"][1])
        assert 8 + size + ends[-1] == len(data)
    data = (tmp_path / "c" / tile["file"]).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    own = {key.rsplit("/", 1)[1]: of for key, of in header.items() if key.startswith(tile["key"] + "/")}
    shapes = {name: (of["dtype"], of["shape"]) for name, of in own.items()}
    assert shapes == {
        "weight": ("I8", [18, 12]),
        "exponents": ("I8", [18, 1]),
        "fp32_weight": ("F32", [2, 12]),
        "moment.exp_avg": ("F32", [20, 12]),
        "moment.exp_avg_sq": ("F32", [20, 12]),
    }
    found = load_file(tmp_path / "c" / tile["file"])
    for name in ("weight", "fp32_weight"):
        assert torch.equal(found[f"{tile['key']}/{name}"], model.state_dict()[f"word.{name}"])

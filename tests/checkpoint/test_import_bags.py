"""Weights of plain embedding modules become tables, all else the part ``model``."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hotbed.checkpoint import load_checkpoint
from hotbed.checkpoint.importers import import_checkpoint
from hotbed.embed import EmbeddingCollection
from hotbed.specs import Feature, Table
from tests.checkpoint.peers import refused


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"user": nn.EmbeddingBag(20, 8), "item": nn.Embedding(30, 8)})
        self.linear = nn.Linear(8, 2)
        self.register_buffer("scalar", torch.tensor(2.5))


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [Table("user", 20, 8), Table("item", 30, 8)]
        self.embeddings = EmbeddingCollection(tables, [Feature("u", "user"), Feature("i", "item")])
        self.linear = nn.Linear(8, 2)
        self.register_buffer("scalar", torch.tensor(0.0))


def states() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return Plain().state_dict()


@pytest.mark.parametrize("form", ["safetensors", "pt", "in state_dict"])
@pytest.mark.parametrize("names", [None, ["user", "item"]])
def test_a_plain_model_comes_in(tmp_path: Path, form: str, names: list[str] | None) -> None:
    state = states()
    file = tmp_path / ("model.safetensors" if form == "safetensors" else "model.pt")
    if form == "safetensors":
        save_file(state, file)
    else:
        torch.save(state if form == "pt" else {"state_dict": state, "step": 3}, file)
    import_checkpoint(file, tmp_path / "c", "embedding_bag", names=names)
    ours = Ours()
    load_checkpoint(tmp_path / "c", {"model": ours})
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor, state[key]), key


def test_tables_in_files_of_their_own(tmp_path: Path) -> None:
    state = states()
    folder = tmp_path / "tables"
    folder.mkdir()
    np.save(folder / "user.npy", state["embeddings.user.weight"].numpy())
    torch.save(state["embeddings.item.weight"], folder / "item.pt")
    save_file({"page.weight": torch.ones(3, 4, dtype=torch.bfloat16)}, folder / "page.safetensors")
    (folder / "README.md").write_text("not a table")
    manifest = import_checkpoint(folder, tmp_path / "c", "embedding_bag", collection="bags")
    assert {name: (t.spec.rows, t.spec.dim) for name, t in manifest.tables.items()} == {
        "bags.item": (30, 8),
        "bags.page": (3, 4),
        "bags.user": (20, 8),
    }
    collection = EmbeddingCollection(
        [Table("item", 30, 8), Table("page", 3, 4), Table("user", 20, 8)],
        [Feature(name, name) for name in ("item", "page", "user")],
    )
    model = nn.ModuleDict({"bags": collection})
    load_checkpoint(tmp_path / "c", {"model": model})
    for name in ("user", "item"):
        assert torch.equal(collection.weight(name), state[f"embeddings.{name}.weight"])
    assert torch.equal(collection.weight("page"), torch.ones(3, 4))


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({"a.pt": {"x.weight": torch.zeros(2, 2)}}, {"names": ["y"]}, "got table 'y.weight', expected one of x.weight"),
        ({"a.pt": {"x.weight": torch.zeros(2)}}, {"names": ["x"]}, "shape: got [2], expected"),
        ({"a.pt": {"x.weight": torch.zeros(0, 2)}}, {}, "shape: got [0, 2], expected"),
        ({"a.pt": {"x.bias": torch.zeros(2)}}, {}, "tables: got none"),
        ({"a.pt": [1]}, {}, "a.pt: got list, expected a tensor or a state_dict"),
        ({}, {}, "has no .safetensors, .npy, .pt file"),
        (
            {"a.pt": torch.zeros(2, 2), "a.npy": np.zeros((2, 2), np.float32)},
            {},
            "a.npy and in ",
        ),
        ({"a.npy": np.zeros((2, 2), np.int64)}, {}, "a.npy: got int64, expected float32, float16 or float64"),
        ({"a.npy": np.array([None])}, {}, "a.npy is not in NumPy's format, or is truncated: "),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, files: Any, options: Any, message: str) -> None:
    folder = tmp_path / "peer"
    folder.mkdir()
    for name, value in files.items():
        if name.endswith(".npy"):
            np.save(folder / name, value)
        else:
            torch.save(value, folder / name)
    assert message in refused(folder, "embedding_bag", **options)

"""Checkpoints become directories that plain PyTorch loads, piece by piece, and come back as they were."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import hotbed as hb
from hotbed.checkpoint import export_dcp as module
from hotbed.checkpoint import load_checkpoint, save_checkpoint
from hotbed.checkpoint.export_dcp import export_dcp
from hotbed.checkpoint.importers import import_checkpoint
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError
from hotbed.specs import Dynamic, Feature, RowDtype, Table
from tests.checkpoint.damage import flip_last_bit

ODD = "Straße 1/2.x=y"


class Ours(nn.Module):
    def __init__(self, dtype: RowDtype = "fp32") -> None:
        super().__init__()
        tables = [Table("user", 20, 16), Table(ODD, 9, 16, dtype=dtype), Table("wide", 7, 32)]
        self.embeddings = EmbeddingCollection(tables, [Feature(t.name, t.name) for t in tables])
        self.linear = nn.Linear(16, 2)
        self.register_buffer("scalar", torch.tensor(2.5))


class Plain(nn.Module):
    """The same in plain PyTorch."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"user": nn.EmbeddingBag(20, 16), "wide": nn.Embedding(7, 32)})
        self.odd = nn.Embedding(9, 16, dtype=dtype)
        self.linear = nn.Linear(16, 2)
        self.register_buffer("scalar", torch.tensor(0.0))


def loaded(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize(
    ("dtype", "theirs"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("int8", torch.float32)],
)
@pytest.mark.parametrize("piece", [None, 200])
def test_plain_pytorch_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: RowDtype, theirs: torch.dtype, piece: int | None
) -> None:
    if piece is not None:
        monkeypatch.setattr(module, "MEMORY_BYTES", piece)
        monkeypatch.setattr("hotbed.checkpoint.convert.MEMORY_BYTES", piece)
    ours, plain = Ours(dtype), Plain(theirs)
    optimizer = hb.optim.RowWiseAdagrad(ours, lr=0.1)
    save_checkpoint(tmp_path / "c", {"model": ours, "tables": optimizer}, step=4)
    names = {f"embeddings.{ODD}": "odd.weight"}
    found = export_dcp(tmp_path / "c", tmp_path / "d", names=names, prefix="model.")
    assert found["step"] == 4 and found["tables"]["embeddings.user"]["key"] == "model.embeddings.user.weight"
    loaded(tmp_path / "d", {"model": plain.state_dict()})
    weights: dict[str, Tensor] = {
        "user": plain.embeddings["user"].weight,
        "wide": plain.embeddings["wide"].weight,
        ODD: plain.odd.weight,
    }  # pyright: ignore[reportAssignmentType]
    for name, weight in weights.items():
        assert torch.equal(weight.float(), ours.embeddings.weight(name)), name
    assert torch.equal(plain.linear.weight, ours.linear.weight) and plain.scalar == 2.5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "d"]
    files = len(list((tmp_path / "d").glob("*.distcp")))
    assert files == 6 if piece is None else files > 15


def test_it_comes_back_and_torchs_tools_read_it(tmp_path: Path) -> None:
    ours = Ours()
    save_checkpoint(tmp_path / "c", {"model": ours})
    export_dcp(tmp_path / "c", tmp_path / "d", prefix="net.")
    import_checkpoint(tmp_path / "d", tmp_path / "e", "dcp", prefix="net.")
    back = Ours()
    load_checkpoint(tmp_path / "e", {"model": back})
    for key, tensor in ours.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "d", tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt")["net"]
    assert whole.keys() == ours.state_dict().keys()


def test_a_swapped_model_has_the_keys_that_it_had(tmp_path: Path) -> None:
    def model() -> Any:
        return nn.ModuleDict({"a": nn.Sequential(nn.Embedding(6, 4)), "b": nn.Embedding(5, 8)})

    swapped, plain = hb.swap_embeddings(model()), model()
    save_checkpoint(tmp_path / "c", {"model": swapped})
    export_dcp(tmp_path / "c", tmp_path / "d")
    loaded(tmp_path / "d", plain.state_dict())
    for key, tensor in plain.state_dict().items():
        assert torch.equal(tensor, swapped.state_dict()[key]), key


def test_what_cannot_be_written_says_so_and_makes_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", {"model": Ours()})
    for options, message in (
        ({"names": {"embeddings.usr": "x"}}, "names: got table 'embeddings.usr', expected tables of the checkpoint"),
        (
            {"names": {"embeddings.user": "linear.bias"}},
            "two tensors would have the key 'linear.bias'. Pass another key for table 'embeddings.u",
        ),
        (
            {"names": {"embeddings.user": "embeddings.wide.weight"}},
            "two tables would have the key 'embeddings.wide.weight'",
        ),
    ):
        with pytest.raises(CheckpointError) as caught:
            export_dcp(tmp_path / "c", tmp_path / "d", **options)
        assert message in str(caught.value)
        assert [p.name for p in tmp_path.iterdir()] == ["c"]
    with pytest.raises(CheckpointError, match="c exists already"):
        export_dcp(tmp_path / "c", tmp_path / "c")
    flip_last_bit(next((tmp_path / "c").glob("tables*")))
    with pytest.raises(CheckpointError, match="its content has changed"):
        export_dcp(tmp_path / "c", tmp_path / "d")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_dynamic_tables_are_refused(tmp_path: Path) -> None:
    table = Table("t", "dynamic", 4, dynamic=Dynamic(capacity_bytes=4096), init_bound=0.1)
    model = EmbeddingCollection([table], [Feature("f", "t")])
    save_checkpoint(tmp_path / "c", {"model": model})
    with pytest.raises(CheckpointError, match="table 't' is dynamic"):
        export_dcp(tmp_path / "c", tmp_path / "d")

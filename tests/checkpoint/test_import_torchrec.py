"""TorchRec's DLRM comes in with the logits that it had."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hotbed.checkpoint.importers import import_checkpoint
from tests.checkpoint.peers import Reference, assert_close, imported_logits, random_reference, refused, upper

BAGS = "sparse_arch.embedding_bag_collection.embedding_bags"


def state_dict(model: Reference, names: list[str], prefix: str = "") -> dict[str, Tensor]:
    found = {f"{BAGS}.{name}.weight": table for name, table in zip(names, model.tables, strict=True)}
    paths = [
        *(f"dense_arch.model._mlp.{i}._linear" for i in range(len(model.bottom))),
        *(f"over_arch.model.0._mlp.{i}._linear" for i in range(len(model.top) - 1)),
        "over_arch.model.1",
    ]
    for path, (weight, bias) in zip(paths, [*model.bottom, *model.top], strict=True):
        found |= {f"{path}.weight": weight, f"{path}.bias": bias}
    return {f"{prefix}{key}": tensor for key, tensor in found.items()}


@pytest.mark.parametrize("count", [1, 2, 3, 12])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_logits_are_those_of_the_peer(tmp_path: Path, count: int, prefix: str) -> None:
    model = random_reference([20 + i for i in range(count)])
    names = [f"t_cat_{i}" for i in range(count)]  # t_cat_10 would come before t_cat_2
    save_file(state_dict(model, names, prefix), tmp_path / "model.safetensors")
    manifest = import_checkpoint(tmp_path / "model.safetensors", tmp_path / "c", "torchrec")
    assert list(manifest.tables) == [f"embeddings.{name}" for name in names]
    assert_close(imported_logits(tmp_path / "c", model, names), model.logits(upper(model.vectors_of())))


def test_the_order_of_tables_that_have_no_numbers_is_asked_for(tmp_path: Path) -> None:
    model, names = random_reference(), ["user", "item", "page"]
    torch.save({"state_dict": state_dict(model, names)}, tmp_path / "model.pt")
    assert "does not contain the order of the tables item, page, user" in refused(tmp_path / "model.pt", "torchrec")
    import_checkpoint(tmp_path / "model.pt", tmp_path / "c", "torchrec", names=names)
    assert_close(imported_logits(tmp_path / "c", model, names), model.logits(upper(model.vectors_of())))


def test_narrow_tables_become_float32(tmp_path: Path) -> None:
    model = random_reference()
    model = model._replace(tables=[table.half().float() for table in model.tables])
    state = state_dict(model, ["t0", "t1", "t2"])
    halves = {key: t.half() if key.startswith(BAGS) else t for key, t in state.items()}
    save_file(halves, tmp_path / "model.safetensors")
    import_checkpoint(tmp_path / "model.safetensors", tmp_path / "c", "torchrec")
    assert_close(imported_logits(tmp_path / "c", model, ["t0", "t1", "t2"]), model.logits(upper(model.vectors_of())))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["t0", "t1", "t3"], "names: got 't3', "),
        (["t0", "t1"], "names lacks 't2'. Pass all 3 tables once, in the order of their configs"),
        (["t0", "t1", "t2", "t2"], "names repeats a table. Pass all 3"),
    ],
)
def test_names_must_be_those_of_the_tables(tmp_path: Path, names: list[str], message: str) -> None:
    save_file(state_dict(random_reference(), ["t0", "t1", "t2"]), tmp_path / "m.safetensors")
    assert message in refused(tmp_path / "m.safetensors", "torchrec", names=names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{BAGS}.t0.weight": None, f"{BAGS}.t1.weight": None, f"{BAGS}.t2.weight": None}, f"has no {BAGS}.TABLE.wei"),
        ({"inter_arch.crossnet.bias.0": torch.zeros(4)}, "got a DLRM_DCN (inter_arch.crossnet)"),
        ({"over_arch.model.1.bias": None}, "has no 'over_arch.model.1.bias'"),
        ({f"{BAGS}.t1.weight": torch.zeros(5)}, "shape: got [5], expected"),
        (
            {f"{BAGS}.t3.weight": torch.zeros(5, 16)},
            "got 22 inputs, expected 26: 16 columns and the products of 5 vectors",
        ),
        (
            {"over_arch.model.0._mlp.0._linear.weight": torch.zeros(32, 24)},
            "got 24 inputs, expected 22: 16 columns and the pr",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Tensor | None], message: str) -> None:
    state = state_dict(random_reference(), ["t0", "t1", "t2"]) | changes
    save_file({key: t for key, t in state.items() if t is not None}, tmp_path / "m.safetensors")
    assert message in refused(tmp_path / "m.safetensors", "torchrec")


def test_files_of_no_known_kind(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"x")
    (tmp_path / "m.safetensors").write_bytes(b"x")
    assert "m.bin, expected one of .safetensors, .npy, .pt" in refused(tmp_path / "m.bin", "torchrec")
    assert "m.safetensors is not a safetensors file: " in refused(tmp_path / "m.safetensors", "torchrec")

"""NVIDIA's PyTorch DLRM comes in with the logits that it had."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotbed.checkpoint import tensor_files as writing_module
from hotbed.checkpoint.importers import import_checkpoint
from tests.checkpoint.peers import Reference, assert_close, imported_logits, lower, pad8, random_reference, refused

NAMES = ["cat_0", "cat_1", "cat_2"]


def save(path: Path, model: Reference, metadata: Any = None, *, module: str = "") -> Path:
    path.mkdir()
    for i, table in enumerate(model.tables):
        (path / f"bottom_model.embeddings.{i}.bin").write_bytes(table.numpy().tobytes())
        torch.save({"shape": table.shape}, path / f"embeddings.{i}.meta.pt")
    for name, layers in (("bottom_model", model.bottom), ("top_model", model.top[:-1])):
        weights = {"weights": [nn.Parameter(w) for w, _ in layers], "biases": [nn.Parameter(b) for _, b in layers]}
        torch.save(weights, path / f"{name}.mlp.pt")
    weight, bias = model.top[-1]
    torch.save({f"{module}weight": weight, f"{module}bias": bias}, path / "top_model.out.pt")
    torch.save(metadata or {"data": {"epoch": 0, "step": 9}, "config": {}}, path / "metadata.pt")
    return path


def metadata(buckets: list[list[int]], **config: Any) -> Any:
    return {"data": {"device_mapping": {"bottom_mlp": 0, "embedding": buckets}}, "config": config}


@pytest.mark.parametrize("padding", ["multiple of 8", "one column"])
@pytest.mark.parametrize(
    ("told", "order"),
    [
        (None, [0, 1, 2]),
        (metadata([[0, 2, 1]]), [0, 2, 1]),
        (metadata([[0, 2, 1]], bottom_features_ordered=True), [0, 2, 1]),  # of one GPU it was ignored
        (metadata([[1], [2, 0]]), [1, 2, 0]),
        (metadata([[1], [2, 0]], bottom_features_ordered=True), [0, 1, 2]),
        (metadata([[], [2], [0, 1]]), [2, 0, 1]),
    ],
)
def test_logits_are_those_of_the_peer(tmp_path: Path, padding: str, told: Any, order: list[int]) -> None:
    columns = pad8(random_reference()) if padding == "multiple of 8" else 1
    model = random_reference(padding=columns)
    source = save(tmp_path / "peer", model, told)
    seen: list[tuple[int, int]] = []
    manifest = import_checkpoint(
        source, tmp_path / "c", "nvidia_dlrm", progress=lambda done, total: seen.append((done, total))
    )
    assert list(manifest.tables) == [f"embeddings.{name}" for name in NAMES]
    assert list(manifest.parts) == ["model"]
    assert seen[-1] == (34 * 16, 34 * 16)
    expected = model.logits(lower(model.vectors_of(order), columns))
    assert_close(imported_logits(tmp_path / "c", model, NAMES), expected)


def test_tables_may_have_names_and_be_larger_than_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing_module, "FILE_BYTES", 500)
    model = random_reference(padding=pad8(random_reference()))
    source = save(tmp_path / "peer", model, module="module.")
    manifest = import_checkpoint(source, tmp_path / "c", "nvidia_dlrm", names=["x", "y", "z"], collection="embeddings")
    assert len(manifest.tables["embeddings.x"].tiles) == 3
    expected = model.logits(lower(model.vectors_of(), pad8(model)))
    assert_close(imported_logits(tmp_path / "c", model, ["x", "y", "z"]), expected)


def wrong(change: Callable[[Path], Any], message: str, **options: Any) -> Any:
    return pytest.param(change, options, message, id=message[:30])


def rewrite(file: str, value: Any) -> Callable[[Path], Any]:
    return lambda path: torch.save(value, path / file)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        wrong(lambda p: (p / "metadata.pt").unlink(), "metadata.pt is missing"),
        wrong(lambda p: (p / "embeddings.2.meta.pt").unlink(), "embeddings.2.meta.pt is missing"),
        wrong(lambda p: [f.unlink() for f in p.glob("*.bin")], "has no bottom_model.embeddings.0.bin"),
        wrong(
            lambda p: (p / "bottom_model.embeddings.1.bin").write_bytes(b"x" * 16),
            "embeddings.1.bin: got 16 bytes, expected 320 for 5 rows × 16 float32",
        ),
        wrong(rewrite("embeddings.0.meta.pt", {"shape": [3]}), "shape: got [3], expected [rows, dim]"),
        wrong(rewrite("metadata.pt", [1]), "metadata.pt: got list, expected a dict"),
        wrong(
            rewrite("metadata.pt", metadata([[0, 1]])),
            "metadata.pt: features: got [0, 1], expected 0 … 2",
        ),
        wrong(
            rewrite("metadata.pt", metadata([[0, 1, 2]], interaction_op="cat")),
            "interaction_op: got 'cat', expected 'dot'",
        ),
        wrong(rewrite("bottom_model.mlp.pt", {"weights": []}), "got 0 weights and 0 biases"),
        wrong(rewrite("top_model.out.pt", {"weight": torch.zeros(1, 8)}), "got weight, expected weight and bias"),
        wrong(
            rewrite("top_model.out.pt", {"weight": torch.zeros(1, 9), "bias": torch.zeros(1)}),
            "top_model.out.pt: got 9 inputs, expected 8",
        ),
        wrong(
            rewrite("top_model.out.pt", {"weight": torch.zeros(1, 8), "bias": torch.zeros(2)}),
            "top_model.out.pt: got weight [1, 8] and bias [2], expected [out, in] and [out]",
        ),
        wrong(lambda p: torch.save(nn.Linear(1, 1), p / "top_model.out.pt"), "Only tensors and plain values are read"),
        wrong(lambda p: (p / "metadata.pt").write_bytes(b"junk"), "metadata.pt cannot be read: "),
        wrong(lambda p: None, "names: got 2 names, expected 3", names=["a", "b"]),
        wrong(lambda p: None, "names: got 'a' 2 times", names=["a", "b", "a"]),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: Any, options: Any, message: str) -> None:
    model = random_reference(padding=pad8(random_reference()))
    change(save(tmp_path / "peer", model))
    assert message in refused(tmp_path / "peer", "nvidia_dlrm", **options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (random_reference(padding=4), "got 26 inputs (as with products of vectors with themselves)"),
        (random_reference(padding=64 - 22), "got 64 inputs (as with concatenated vectors)"),
        (random_reference(padding=3), "got 25 inputs"),
        (random_reference()._replace(bottom=random_reference(dim=8).bottom), "got 16 columns, expected 8"),
    ],
)
def test_another_interaction_is_refused(tmp_path: Path, model: Reference, message: str) -> None:
    assert message in refused(save(tmp_path / "peer", model), "nvidia_dlrm")


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    assert "absent does not exist" in refused(tmp_path / "absent", "nvidia_dlrm")

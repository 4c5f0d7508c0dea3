"""Protects that checkpoints are inspected, verified and converted on the command line as by the library."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from hotbed.checkpoint import find_checkpoint, read_manifest, save_checkpoint
from hotbed.cli.main import main
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError, DataError
from hotbed.optim import RowWiseAdagrad
from hotbed.specs import Feature, Table
from hotbed.train.runs.model_export import export_single
from tests.cli.cases import Output, refused, train


@pytest.fixture(name="checkpoint")
def checkpoint_fixture(tmp_path: Path) -> Path:
    model = torch.nn.Module()
    model.embeddings = EmbeddingCollection([Table("user", 300, 16), Table("item", 40, 16)], _features())
    model.linear = torch.nn.Linear(2, 2)
    save_checkpoint(tmp_path / "c", {"model": model, "sparse": RowWiseAdagrad(model, lr=0.1)}, step=7)
    return tmp_path / "c"


def _features() -> list[Feature]:
    return [Feature("user", "user"), Feature("item", "item")]


def written(argv: list[str], tmp_path: Path) -> Any:
    file = tmp_path / "out.json"
    assert main([*argv, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_inspect_shows_the_manifest_and_reads_nothing_else(checkpoint: Path, tmp_path: Path, capsys: Output) -> None:
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    found = written(["checkpoint", "inspect", str(checkpoint)], tmp_path)
    assert (found["step"], found["ranks"], found["parts"], found["files"]) == (7, 1, ["model", "sparse"], 3)
    assert found["tables"][0] == {
        "table": "embeddings.user",
        "rows": 300,
        "dim": 16,
        "dtype": "fp32",
        "moments": ["sum_of_squares"],
        "tiles": 1,
        "compact": False,
    }
    assert "embeddings.item" in capsys.readouterr().out


def test_verify_counts_blocks_and_names_damage(checkpoint: Path, tmp_path: Path, capsys: Output) -> None:
    found = written(["checkpoint", "verify", str(checkpoint)], tmp_path)
    manifest = read_manifest(checkpoint)
    assert (found["files"], found["blocks"], found["bytes"]) == (3, 3, manifest.nbytes)
    assert found["bytes_per_s"] == pytest.approx(found["bytes"] / found["seconds"])
    captured = capsys.readouterr()
    assert "c: 3 files, 3 blocks undamaged (0.000 GB, " in captured.out
    assert captured.err.strip() == f"verifying {checkpoint} …"
    file = next(checkpoint.glob("tables-*"))
    file.write_bytes(b"x" * file.stat().st_size)
    message = refused(["checkpoint", "verify", str(checkpoint)], capsys)
    assert "block 0 of 1" in message
    assert "Copy the checkpoint again" in message


def test_convert_makes_narrow_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--compact", "--dtype", "bf16", "--no_moments"]
    found = written(["checkpoint", "convert", str(checkpoint), str(tmp_path / "d"), *options], tmp_path)
    assert [(t["compact"], t["dtype"], t["moments"]) for t in found["tables"]] == [(True, "bf16", [])] * 2
    assert found["parts"] == ["model"]
    options = ["--dtype", '{"embeddings.user": "int8"}']
    found = written(["checkpoint", "convert", str(checkpoint), str(tmp_path / "f"), *options], tmp_path)
    assert [t["dtype"] for t in found["tables"]] == ["int8", "fp32"]


def test_convert_imports_and_exports(tmp_path: Path, capsys: Output) -> None:
    weights = {"user.weight": torch.randn(5, 4), "item.weight": torch.randn(6, 4)}
    save_file(weights, tmp_path / "peer.safetensors")
    source, imported, exported = str(tmp_path / "peer.safetensors"), str(tmp_path / "c"), str(tmp_path / "out")
    options = ["--from", "embedding_bag", "--names", "user, item", "--collection", "bags"]
    found = written(["checkpoint", "convert", source, imported, *options], tmp_path)
    assert [t["table"] for t in found["tables"]] == ["bags.user", "bags.item"]
    assert "tables, in the order of the model's features: bags.user, bags.item" in capsys.readouterr().out
    found = written(["checkpoint", "convert", imported, exported, "--to", "safetensors"], tmp_path)
    assert found["tables"]["bags.item"]["file"] == "bags.item.safetensors"
    assert torch.equal(load_file(f"{exported}/bags.user.safetensors")["weight"], weights["user.weight"])


def test_convert_goes_through_torchs_distributed_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("embeddings.user = odd, one\n\nembeddings.item=b\n", encoding="utf-8")
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    options = ["--to", "dcp", "--names", f"@{names}", "--prefix", "model."]
    found = written(["checkpoint", "convert", str(checkpoint), out, *options], tmp_path)
    assert {t["key"] for t in found["tables"].values()} == {"model.odd, one", "model.b"}
    names.write_text("user=odd, one\nitem=b\n", encoding="utf-8")
    options = ["--from", "dcp", "--names", f"@{names}", "--prefix", "model."]
    found = written(["checkpoint", "convert", out, back, *options], tmp_path)
    assert {t["table"] for t in found["tables"]} == {"embeddings.user", "embeddings.item"}
    for kind, of in (("one", checkpoint), ("two", Path(back))):
        main(["checkpoint", "convert", str(of), str(tmp_path / kind), "--to", "safetensors"])
    for table in ("embeddings.user", "embeddings.item"):
        there, here = (load_file(tmp_path / kind / f"{table}.safetensors")["weight"] for kind in ("one", "two"))
        assert torch.equal(there, here)


def test_a_run_is_converted_by_its_newest_checkpoint(recipe: Path, tmp_path: Path) -> None:
    _, _, run = train(recipe, "--train.checkpoint", "last")
    logging.getLogger("hotbed").info("trained")
    found = written(["checkpoint", "convert", str(run), str(tmp_path / "d"), "--compact"], tmp_path)
    assert found["recipe"] == "small"
    assert main(["eval", "--checkpoint", str(tmp_path / "d")]) == 0
    assert find_checkpoint(run).name.startswith("last-")
    found = written(["checkpoint", "convert", str(run), str(tmp_path / "plain"), "--to", "torch"], tmp_path)
    assert len(found["tables"]) == 26
    assert (tmp_path / "plain" / "model.pt2").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "tf2"], "--from: got 'tf2', expected one of hotbed"),
        (["--to", "onnx"], "--to: got 'onnx', expected one of hotbed"),
        (["--dtype", "int7"], "dtype: got 'int7', expected one of fp32, bf16, fp16, int8, fp8; did you mean 'int8'?"),
        (["--compakt"], "unknown argument --compakt; did you mean '--compact'?"),
        (["--from", "dcp", "--to", "torch"], "--from dcp --to torch: expected hotbed"),
        (["--to", "torch", "--compact"], "--compact has an effect only when converting from hotbed to hotbed"),
        (["--from", "dcp", "--dtype", "int8"], "--dtype has an effect only when converting from hotbed to hotbed"),
        (["--to", "safetensors", "--no_moments"], "--no_moments has an effect only when converting from hotbed to"),
        (["--names", "a"], "--names has an effect only when converting from another library (--from), or to dcp (--to"),
        (["--prefix", "a."], "--prefix has an effect only when converting from another library (--from), or to dcp"),
        (["--to", "dcp", "--names", "a,b"], "--names: got 'a,b'"),
        (["--to", "dcp", "--names", "a=b,c"], "--names: got 'c'"),
        (["--to", "dcp", "--names", "a=b,a=c"], "--names: got a table twice in a, a"),
        (["--to", "dcp", "--names", "x=y"], "names: got table 'x', expected tables of the checkpoint: embeddings."),
        (["--from", "dcp"], "is not a directory of torch.distributed.checkpoint: it has no .metadata file"),
        (["--collection", "a"], "--collection has an effect only when converting from another library (--from)"),
        (["--data", "a"], "--data has an effect only when converting to torch (--to torch)"),
        (["--from", "nvidia_dlrm"], "c/metadata.pt is missing"),
        (["--to", "torch"], "has no recipe"),
    ],
)
def test_what_cannot_be_is_refused(
    checkpoint: Path, tmp_path: Path, options: list[str], message: str, capsys: Output
) -> None:
    assert message in refused(["checkpoint", "convert", str(checkpoint), str(tmp_path / "d"), *options], capsys)
    assert not (tmp_path / "d").exists()


# -- exports for programs without hotbed -----------------------------------------------------------------------------


def test_a_run_is_exported_without_its_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    rows = {
        "user": draw.integers(0, 50, 2000),
        "word": draw.choice(["a", "b", "c"], 2000),
        "x": draw.normal(size=2000),
        "click": draw.integers(0, 2, 2000),
    }
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.table(rows), data / "part.parquet")
    assert main(["init", str(data), "--out", str(tmp_path / "r.yaml")]) == 0
    assert main(["train", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "runs"), "--train.epochs", "1"]) == 0
    (run,) = (tmp_path / "runs").glob("*/*")
    assert main(["export", str(run), str(tmp_path / "with")]) == 0
    data.rename(tmp_path / "elsewhere")
    assert main(["export", str(run), str(tmp_path / "without")]) == 0
    for file in (f for f in (tmp_path / "with").rglob("*") if f.is_file() and f.name != "manifest.json"):
        other = tmp_path / "without" / file.relative_to(tmp_path / "with")
        if file.suffix == ".pt2":
            ours, theirs = (torch.export.load(f).state_dict for f in (file, other))
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        else:
            assert file.read_bytes() == other.read_bytes(), file
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "torch"), "--to", "torch"]) == 0
    assert {"inputs.json", "model.pt2"} == {f.name for f in (tmp_path / "torch").iterdir()}
    inputs = json.loads((tmp_path / "torch" / "inputs.json").read_text())
    assert {name: of["values"] for name, of in inputs["ids"].items()} == {"user": "integers", "word": "text"}


def test_places_that_cannot_be_used_are_named(tmp_path: Path, recipe: Path, prepared: Path) -> None:
    status, _, run = train(recipe, "--train.checkpoint", "last", "--train.steps", "1")
    assert status == 0
    (tmp_path / "model.pt2").touch()
    with pytest.raises(CheckpointError, match=r"model\.pt2 exists\. Choose a different file"):
        export_single(run, tmp_path / "model.pt2")
    with pytest.raises(CheckpointError, match="memory://out is a URI, but torch writes "):
        export_single(run, "memory://out")
    prepared.rename(prepared.with_name("moved"))
    try:
        with pytest.raises(DataError, match=f"{prepared}.*--data"):
            export_single(run, tmp_path / "new")
    finally:
        prepared.with_name("moved").rename(prepared)

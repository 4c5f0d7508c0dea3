"""Protects that commands take Parquet data and checkpoints from object stores; others say that they do not."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.cli.main import main
from hotbed.locations import resolve_uri
from tests.cli.cases import Output, refused, train


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URI of a folder that does not exist, with PATH where more of the path goes; s3:// is in test_object_store.py."""
    return f"{request.param}://{tmp_path if request.param == 'file' else '/' + tmp_path.name}/PATH"


def write_clicks(uri: str) -> None:
    table = {
        "label": [0, 1] * 600,
        "user": [f"u{i % 7}" for i in range(1200)],
        "age": [0.5 + i % 3 for i in range(1200)],
    }
    filesystem, path = resolve_uri(uri)
    filesystem.create_dir(str(Path(path).parent))
    with filesystem.open_output_stream(path) as stream:
        pq.write_table(pa.table(table), stream, row_group_size=100)


def test_from_parquet_to_an_evaluated_checkpoint(place: str, tmp_path: Path, capsys: Output) -> None:
    data, kept = place.replace("PATH", "clicks.parquet"), place.replace("PATH", "kept")
    write_clicks(data)
    recipe = tmp_path / "recipe.yaml"
    assert main(["init", data, "--out", str(recipe)]) == 0
    written = yaml.safe_load(recipe.read_text())
    assert written["name"] == "clicks"
    out, figures = ["--out", str(tmp_path / "runs")], ["--json", str(tmp_path / "figures.json")]
    argv = ["train", str(recipe), *out, *figures, "--train.checkpoint_dir", kept, "--train.batch_size", "100"]
    assert main([*argv, "--train.steps", "3", "--train.device", "cpu"]) == 0
    assert main([*argv, "--train.steps", "5", "--train.device", "cpu", "--resume", kept]) == 0
    summary = json.loads((tmp_path / "figures.json").read_text())
    assert summary["steps"] == 5
    assert main(["eval", "--checkpoint", kept, *figures]) == 0
    assert json.loads((tmp_path / "figures.json").read_text())["test"] == summary["test"]
    assert main(["train", str(recipe), *out, "--init_from", kept, "--train.steps", "1", "--train.device", "cpu"]) == 0
    checkpoint = kept.replace("kept", "kept/last-00000005")
    for command in (["inspect"], ["checkpoint", "inspect"], ["checkpoint", "verify"]):
        assert main([*command, checkpoint, *figures]) == 0
    for path, kind in ((checkpoint, "checkpoint"), (data, "Parquet")):
        assert main(["inspect", path, *figures]) == 0
        found = json.loads((tmp_path / "figures.json").read_text())
        assert (found["kind"], found["path"]) == (kind, path.removeprefix("file://"))
    assert main(["inspect", "--skew", data, *figures]) == 0
    assert "nowhere" in refused(["inspect", place.replace("PATH", "nowhere")], capsys)


def test_a_run_in_an_object_store_is_inspected(s3: str, recipe: Path, tmp_path: Path) -> None:
    _, _, run = train(recipe, "--train.steps", "2", "--train.checkpoint_dir", s3.replace("PATH", "run/checkpoints"))
    for name in ("recipe.yaml", "summary.json"):
        filesystem, path = resolve_uri(s3.replace("PATH", f"run/{name}"))
        with filesystem.open_output_stream(path) as stream:
            stream.write((run / name).read_bytes())
    assert main(["inspect", s3.replace("PATH", "run"), "--json", str(tmp_path / "figures.json")]) == 0
    found = json.loads((tmp_path / "figures.json").read_text())
    assert (found["kind"], found["finished"], found["summary"]["steps"]) == ("run", True, 2)
    assert [path.partition("?")[0] for path in found["checkpoints"]] == ["s3://models/run/checkpoints/last-00000002"]


def test_what_has_to_be_local_says_so(recipe: Path, capsys: Output) -> None:
    for argv, what in (
        (["train", str(recipe), "--out", "s3://b/runs"], "--out: got s3://b/runs"),
        (["demo", "s3://b/log.tsv"], "DATA: got s3://b/log.tsv"),
        (["demo", "--out", "s3://b"], "--out: got s3://b"),
        (["prepare", "log.tsv", "out", "--vocabulary", "s3://b/v"], "--vocabulary: got s3://b/v"),
        (["serve", "model", "--cache", "s3://b/c"], "--cache: got s3://b/c"),
        (["prepare", "log.tsv", "s3://b"], "OUT: got s3://b"),
        (["inspect", "--skew", str(recipe), "--out", "s3://b/skew"], "--out: got s3://b/skew"),
        (["pack", str(recipe), "s3://b", "--budget", "1"], "OUT: got s3://b"),
    ):
        message = refused(argv, capsys)
        assert f"{what}, expected a local path" in message
    message = refused(["train", str(recipe), "--data.path", "s3://b/data"], capsys)
    assert "s3://b/data: got a URI, expected a local folder of split-binary data" in message
    for argv in (["inspect", "nonsense://x"], ["init", "nonsense://x"], ["eval", "--checkpoint", "nonsense://x"]):
        assert "nonsense://x cannot be opened" in refused(argv, capsys)

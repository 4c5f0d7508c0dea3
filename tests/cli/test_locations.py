"""Protects that commands take Parquet data and checkpoints from object stores; others say that they do not."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.checkpoint.storage import exists, new_output, read_text_uri, write_text_uri
from hotbed.cli.main import main
from hotbed.locations import resolve_uri
from tests.cli.cases import Output, refused, train
from tests.matrix import full


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


class Bucket:
    """URIs of a folder, which no other test has."""

    def __init__(self, template: str) -> None:
        self._template = template

    def __call__(self, path: str) -> str:
        return self._template.replace("PATH", path)

    def figures(self) -> dict[str, Any]:
        return json.loads(read_text_uri(self("figures.json")))


@pytest.fixture
def at(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    """A folder of an object store, or a local one if the parameter of the test is "file"."""
    if getattr(request, "param", "s3") == "file":
        return Bucket(f"file://{tmp_path}/PATH")
    return Bucket(request.getfixturevalue("s3").replace("PATH", f"{tmp_path.name}/PATH"))


@pytest.fixture
def clicks(at: Bucket) -> Bucket:
    users, ages = [f"u{i % 7}" for i in range(1200)], [0.5 + i % 3 for i in range(1200)]
    with new_output(at("clicks.parquet")) as stream:
        pq.write_table(pa.table({"label": [0, 1] * 600, "user": users, "age": ages}), stream, row_group_size=100)
    return at


@pytest.mark.parametrize("at", ["s3", full("file")], indirect=True)
def test_from_a_recipe_to_predictions(clicks: Bucket, tmp_path: Path, capsys: Output) -> None:
    at, figures = clicks, ["--json", clicks("figures.json")]
    recipe, kept = at("recipes/clicks.yaml"), at("kept")
    assert main(["init", at("clicks.parquet"), "--valid", "--out", recipe]) == 0
    assert "exists and is not overwritten" in refused(["init", at("clicks.parquet"), "--out", recipe], capsys)
    quick = ["--train.batch_size", "100", "--train.device", "cpu", "--train.steps"]
    assert main(["train", recipe, *quick, "2", "--dry_run", *figures]) == 0
    assert at.figures()["memory"]
    out = ["--out", str(tmp_path / "runs")]
    assert main(["train", recipe, *out, *quick, "2", "--train.checkpoint_dir", kept, *figures]) == 0
    assert at.figures()["steps"] == 2
    assert main(["train", recipe, *out, *quick, "3", "--train.checkpoint_dir", kept, "--resume", kept, *figures]) == 0
    trained = at.figures()
    assert main(["eval", "--checkpoint", kept, *figures]) == 0
    assert at.figures()["test"] == trained["test"]
    for name in ("scores.parquet", "scores.csv"):
        argv = ["predict", kept, at("clicks.parquet"), "--split", "train", "--keep", "user", "--out", at(name)]
        assert main([*(a for a in argv if a not in ("--split", "train")), *figures]) == 0
        assert at.figures()["rows"] == 1200
        assert "which exists" in refused(argv, capsys)
    filesystem, path = resolve_uri(at("scores.parquet"))
    scores = pq.read_table(path, filesystem=filesystem)
    assert (scores.num_rows, scores.column_names) == (1200, ["user", "score"])
    assert read_text_uri(at("scores.csv")).splitlines()[0] == '"user","score"'
    assert main(["inspect", "--skew", recipe, *figures]) == 0
    assert at.figures()["samples"] > 0
    copy = at("copies/int8")
    assert main(["checkpoint", "convert", kept, copy, "--dtype", "int8", "--no_moments", *figures]) == 0
    for command in (["inspect"], ["checkpoint", "inspect"], ["checkpoint", "verify"]):
        assert main([*command, copy, *figures]) == 0
        assert at.figures()["path"] == copy.removeprefix("file://")
    assert main(["checkpoint", "convert", kept, at("copies/tables"), "--to", "safetensors", *figures]) == 0
    assert main(["checkpoint", "convert", kept, str(tmp_path / "program"), "--to", "torch"]) == 0
    if at("").startswith("s3://"):
        message = refused(["checkpoint", "convert", kept, at("program"), "--to", "torch"], capsys)
        assert "program" in message
        assert "model.pt2" in message
    assert "s3:/m" not in capsys.readouterr().err


def test_logs_are_prepared_and_packed_by_a_recipe(at: Bucket, log: Path, recipe: Path, tmp_path: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    for name, part in (("day_2", lines[:1000]), ("day_10", lines[1000:]), ("notes.txt", [b"no log"])):
        with new_output(at(f"raw/{name}")) as stream:
            stream.write(b"".join(part))
    reports: list[dict[str, Any]] = []
    for i, raw in enumerate(([at("raw")], [at("raw/day_2"), at("raw/day_10")], [str(log)])):
        figures = ["--json", at("figures.json")]
        assert main(["prepare", *raw, str(tmp_path / f"data-{i}"), "--threshold", "5", *figures]) == 0
        reports.append({key: at.figures()[key] for key in ("samples", "rows", "skipped")})
    assert reports[0] == reports[1] == reports[2]
    for file in sorted((tmp_path / "data-0").rglob("*.bin")):
        assert file.read_bytes() == (tmp_path / "data-2" / file.relative_to(tmp_path / "data-0")).read_bytes()
    write_text_uri(at("small.yaml"), recipe.read_text())
    packed = tmp_path / "packed"
    assert main(["pack", at("small.yaml"), str(packed), "--budget", "100000", "--json", at("figures.json")]) == 0
    write_text_uri(at("hot_rows.json"), (packed / "hot_rows.json").read_text())
    run = ["train", at("small.yaml"), "--out", str(tmp_path / "runs"), "--train.steps", "1", "--data.path", str(packed)]
    assert main([*run, "--hot.rows", at("hot_rows.json")]) == 0


def test_what_is_not_there_says_so(at: Bucket, recipe: Path, capsys: Output) -> None:
    nowhere = at("nowhere")
    for argv, what in (
        (["train", at("no.yaml")], "there is no recipe s3://"),
        (["pack", at("no.yaml"), "out", "--budget", "1"], "no.yaml"),
        (["prepare", nowhere, "out"], "does not exist, expected a Criteo log"),
        (["eval", "--checkpoint", nowhere], "is not a checkpoint"),
        (["inspect", nowhere], "nowhere"),
        (["train", str(recipe), "--parallel.plan", nowhere], "plan s3://"),
        (["train", str(recipe), "--resume", nowhere], "nowhere"),
        (["train", str(recipe), "--json", "s3://"], "has no file name"),
        (
            ["eval", "--checkpoint", "s3://models/x?color=red"],
            "got option 'color', expected one of endpoint_override, region, scheme",
        ),
        (["eval", "--checkpoint", "s3:///x"], "has no bucket. Write s3://BUCKET/PATH"),
        (["eval", "--checkpoint", "gs://models/x?color=red"], "only s3:// has options in a URI"),
    ):
        message = refused(argv, capsys)
        assert what in message
        assert "Traceback" not in message
    message = refused(["eval", "--checkpoint", "s3://key:hidden@models/x"], capsys)
    assert "s3://…@models contains keys" in message
    assert "hidden" not in message
    assert not exists(at("nowhere"))

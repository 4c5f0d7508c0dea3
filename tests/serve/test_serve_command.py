"""Protects `hotbed serve` as a user runs it: scores are predict's, bit for bit; signals, kills and mistakes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest

from hotbed.cli.main import main
from hotbed.cli.serve import _path_name, _row_options
from hotbed.errors import RecipeError
from tests.cli.cases import Output, refused, train
from tests.serve.clients import LONG_S
from tests.serve.processes import running
from tests.train.numbers import POSITIVE, recipe_of_numbers


class Exported(NamedTuple):
    """An exported model, rows to score, and what `hotbed predict` says of them."""

    model: Path
    rows: pl.DataFrame
    scores: list[float]


@pytest.fixture(name="exported", scope="module")
def _exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("exported")
    recipe = recipe_of_numbers(folder, [POSITIVE])
    status, _, run = train(recipe)
    assert status == 0
    model, new, out = folder / "model", folder / "new.parquet", folder / "scores.parquet"
    assert main(["export", str(run), str(model)]) == 0
    pl.read_parquet(folder / "log.parquet").head(40).drop("rating").write_parquet(new)
    assert main(["predict", str(run), str(new), "--out", str(out), "--device", "cpu"]) == 0
    return Exported(model, pl.read_parquet(new), pl.read_parquet(out)["score"].to_list())


def test_served_scores_are_those_of_predict_to_the_bit(exported: Exported) -> None:
    rows: list[dict[str, Any]] = exported.rows.to_dicts()
    with running(exported.model, "--port", 0, "--max_wait_ms", 0) as client:
        whole = client.ask("POST", "/score", rows).json
        assert whole["scores"] == exported.scores
        assert [client.score(row)[0] for row in rows[:5]] == exported.scores[:5]
        name = whole["model"]
        inputs = client.ask("GET", f"/v2/models/{name}").json["inputs"]
        columns: dict[str, list[Any]] = exported.rows.to_dict(as_series=False)
        columns["items.lengths"] = list(map(len, columns["items"]))
        columns["items"] = [item for items in columns["items"] for item in items]
        tensors = [{**of, "shape": [len(columns[of["name"]])], "data": columns[of["name"]]} for of in inputs]
        body = {"inputs": tensors, "parameters": {"binary_data_output": True}}
        answer = client.ask("POST", f"/v2/models/{name}/infer", body)
        binary = answer.body[int(answer.headers["inference-header-content-length"]) :]
        assert np.frombuffer(binary, "<f8").tolist() == exported.scores
        client.process.send_signal(signal.SIGINT)
        assert client.process.wait(LONG_S) == 0


def test_sigterm_ends_with_0_and_a_killed_server_starts_again_on_its_port(exported: Exported) -> None:
    row = exported.rows.to_dicts()[0]
    with running(exported.model, "--port", 0) as client:
        port = client.port
        assert client.score(row) == exported.scores[:1]
        client.process.kill()
        client.process.wait(LONG_S)
    with running("--model", f"b={exported.model}", "--model", f"a={exported.model}", "--port", port) as client:
        answer = client.ask("POST", "/score", [row]).json
        assert (answer["scores"], answer["model"]) == (exported.scores[:1], "b")
        client.process.send_signal(signal.SIGTERM)
        assert client.process.wait(LONG_S) == 0


def test_what_cannot_be_served_is_told(tmp_path: Path, capsys: Output, exported: Exported) -> None:
    model = str(exported.model)
    for argv, message in [
        ([], "models: got none"),
        ([str(tmp_path / "absent")], "absent"),
        ([str(tmp_path)], "has no exported model"),
        (["--model", "x"], "--model: got 'x', expected NAME=DIR"),
        (["--model", f"a={model}", "--model", f"a={model}"], "--model: got 'a' twice"),
        ([model, "--memory_gib", "0"], "--memory_gib: got 0"),
        (
            [model, "--redis", "redis://x"],
            "without --memory_gib",
        ),
        ([model, "--threads", "0"], "--threads: got 0, expected at least 1"),
        ([model, "--directory", str(tmp_path / "none")], "none, expected a directory"),
        ([model, "--poll_s", "0"], "--poll_s: got 0"),
        ([model, "--device", "tpu"], "--device: got 'tpu', expected one of cpu, cuda"),
        ([model, "--host", "0.0.0.0"], "--host 0.0.0.0 is reachable from other machines"),
        (
            [model, "--token_file", str(tmp_path / "none")],
            "none cannot be read (No such file or directory)",
        ),
        (
            [model, "--memory_gib", "1", "--redis", "cache:6379"],
            "got 'cache:6379', expected redis://HOST:PORT/DATABASE",
        ),
        ([model, "--max_batch_rows", "0"], "--max_batch_rows: got 0, expected at least 1"),
    ]:
        assert message in refused(["serve", "--port", "0", *argv], capsys), argv


def test_a_recipe_name_is_made_fit_for_a_path() -> None:
    for name, called in (
        ("shop", "shop"),
        ("odd clicks", "odd-clicks"),
        ("../a/b c", "a-b-c"),
        ("Käufe 2.1", "K-ufe-2.1"),
        ("クリック", "model"),
        ("", "model"),
        ("x" * 200, "x" * 100),
    ):
        assert _path_name(name) == called


def test_options_of_rows_reach_the_model(tmp_path: Path) -> None:
    none = {"redis": None, "memory_gib": None, "directory": None, "verify": True, "threads": None, "device": "cpu"}
    given = {**none, "memory_gib": 0.5, "directory": str(tmp_path), "verify": False, "threads": 2}
    wanted = {"memory_bytes": 1 << 29, "directory": str(tmp_path), "verify": False, "threads": 2, "device": "cpu"}
    secret = {"HOTBED_REDIS": "redis://:secret@here"}
    assert _row_options(given, secret) == {**wanted, "redis": "redis://:secret@here"}
    assert _row_options({**given, "redis": "redis://there"}, secret) == {**wanted, "redis": "redis://there"}
    with pytest.raises(RecipeError, match=r"HOTBED_REDIS .*without --memory_gib") as raised:
        _row_options(none, secret)
    assert "secret" not in str(raised.value)


def test_libraries_that_are_missing_are_named(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hotbed.serve.server", None)
    assert "pip install 'hotbed[serve]'" in refused(["serve", "model"], capsys)

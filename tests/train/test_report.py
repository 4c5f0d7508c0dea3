"""Protects: what a run writes and prints about itself is complete and readable."""

import io
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from hotbed.config import Recipe
from hotbed.files import write_json
from hotbed.train.runs.report import RunDirectory, environment, print_metrics, print_summary, size
from tests.checkpoint.damage import disk_is_full
from tests.train.parallel_cases import RECIPE

SUMMARY: dict[str, Any] = {
    "name": "x",
    "steps": 1234,
    "samples": 5678,
    "samples_per_s": 999.6,
    "test": {"samples": 100, "auc": 0.75, "logloss": 0.5, "normalized_entropy": 0.9, "calibration": None},
    "ids_out_of_range": {"C3": 1200},
    "hardware": "a computer",
    "run": "runs/x/1",
}


def printed(summary: dict[str, Any]) -> str:
    stream = io.StringIO()
    print_summary(Console(file=stream, width=120), summary)
    return stream.getvalue()


CHOSEN = {"precision": "bf16", "precision_because": "this CPU has AMX", "threads": 2}
UNDEFINED = SUMMARY["test"] | {"auc": None, "undefined": {"auc": "all 1,234 labels are 0"}}


@pytest.mark.parametrize(
    ("changes", "shown", "hidden"),
    [
        (
            {},
            ["0.75000", "0.50000", "–", "1,234 steps", "1,000 samples/s", "a computer", "runs/x/1"],
            ["best attainable", "GAUC"],
        ),
        ({}, ["feature C3: 1,200 ids were out of range"], []),
        ({"test": None}, [], ["reached"]),
        (CHOSEN, ["\nprecision bf16 (this CPU has AMX), 2 threads per process\n"], []),
        (CHOSEN | {"threads": 1}, [", 1 thread per process\n"], []),
        ({"best_attainable": {"auc": 0.8, "logloss": 0.45}}, ["best attainable", "0.80000"], []),
        ({"best_attainable": {"auc": float("nan"), "logloss": 0.45}}, [], ["nan"]),
        ({"test": UNDEFINED}, ["\nAUC: – (all 1,234 labels are 0)\n"], []),
    ],
)
def test_the_final_table(changes: dict[str, Any], shown: list[str], hidden: list[str]) -> None:
    text = printed(SUMMARY | changes)
    for part in shown:
        assert part in text
    for part in hidden:
        assert part not in text


def test_a_title_is_not_wrapped_to_the_width_of_its_table() -> None:
    stream = io.StringIO()
    title = f"{'runs/' * 30}checkpoints/last-00000007: test, 100 samples"
    print_metrics(Console(file=stream, width=60), title, {"auc": 0.75})
    assert stream.getvalue().splitlines()[0] == title


def test_every_run_has_its_own_directory_with_a_recipe_that_repeats_it(tmp_path: Path) -> None:
    runs = [RunDirectory(tmp_path, "x") for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert {run.path.parent for run in runs} == {tmp_path / "x"}
    runs[0].begin(RECIPE)
    assert Recipe.from_dict(yaml.safe_load((runs[0].path / "recipe.yaml").read_text())) == RECIPE
    runs[0].finish(SUMMARY | {"path": tmp_path, "nan": float("nan")})
    written = json.loads((runs[0].path / "summary.json").read_text())
    assert written == SUMMARY | {"path": str(tmp_path), "nan": None}


def test_the_environment_names_cpu_cores_and_versions() -> None:
    found = environment(torch.device("cpu"))
    assert found["hardware"].endswith("cores")
    assert found["torch"] == str(torch.__version__)


def test_a_source_checkout_has_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    assert environment(torch.device("cpu"))["hotbed"] == "unknown (source checkout)"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sub" / "f.json"
    write_json(file, {"a": 1})

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for fault, error in ((killed, KeyboardInterrupt), (disk_is_full, OSError)):
        monkeypatch.setattr("hotbed.files.os.fsync", fault)
        with pytest.raises(error):
            write_json(file, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 1}
    assert [f.name for f in file.parent.iterdir()] == ["f.json"]


def test_sizes_are_in_binary_units() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == ["0 B", "1,023 B", "1.5 KiB", "5.0 MiB", "3.0 TiB"]

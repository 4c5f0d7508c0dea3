"""The ablation runs; its figures mean nothing at these sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ablation import CASES, ISAS, Fused, Sizes, Unfused, UnfusedDLRM, batch, dlrm, has, in_host_memory, specs
from benchmarks.json_lines import CHUNK, JsonLines, write_json_lines

ROOT = Path(__file__).resolve().parents[2]
SIZES = Sizes(tables=3, rows=50, batch=16, steps=2, samples=100)


def test_both_sides_of_fused_tables_look_up_the_same(tmp_path: Path):
    ids = batch(SIZES, 0).sparse
    assert torch.equal(Fused(*specs(SIZES))(ids), Unfused(*specs(SIZES))(ids))


def test_both_sides_of_whole_steps_are_one_model():
    samples, made = batch(SIZES, 0), []
    for make in (dlrm, UnfusedDLRM, in_host_memory):
        torch.manual_seed(0)
        made.append(make(*specs(SIZES)).eval()(samples))
    assert made[0].shape == (16, 1) and all(torch.equal(made[0], other) for other in made[1:])


def test_lines_of_json_are_a_source(tmp_path: Path):
    write_json_lines(tmp_path / "data", CHUNK + 3)
    source = JsonLines(str(tmp_path / "data"))
    assert source.chunks("train") == [CHUNK, 3]
    samples = source.read("train", 1)
    first = json.loads((tmp_path / "data" / "1.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert samples.labels is not None and samples.dense is not None
    assert [samples.labels[0, 0], samples.sparse.values[::3].tolist()] == first[:2]
    assert samples.dense[0].tolist() == torch.tensor(first[2]).tolist()


def run(*options: str, file: Path) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "benchmarks.ablation", "--quick", "--json", str(file), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text(encoding="utf-8"))["results"], done.stdout


def test_gains_are_written_beside_the_published_ones(tmp_path: Path):
    names = ["mixed_precision", "fused_tables", "fused_lookups", "broadcast_slow", "host_tables"]  # others take minutes
    results, shown = run("--only", *names, file=tmp_path / "found.json")
    assert list(results) == names and CASES["compile"].published == 3.36
    assert all(of["gain"] > 0 for of in results.values())
    assert results["host_tables"]["published"] == 15.5 and results["fused_lookups"]["published"] is None
    assert "15.50" in shown and "float32 ÷ bf16 autocast" in shown


@pytest.mark.full
def test_mixed_precision_is_measured_with_each_set_of_instructions(tmp_path: Path):
    results, _ = run("--isa", file=tmp_path / "found.json")
    assert list(results) == [name for name, isa in ISAS.items() if has(isa)]
    assert all(of["gain"] > 0 for of in results.values())

"""The comparison with the peers: its arithmetic always; all of it, tiny, where FBGEMM and TorchRec are installed."""

from __future__ import annotations

import fnmatch
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.peers import hotbed_side, report
from benchmarks.peers.results import Results
from benchmarks.peers.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parents[2]
OWN_PYTHON = ROOT / "benchmarks" / "peers" / ".venv" / "bin" / "python"


def seconds(lookup: float, update: float, **more: float) -> dict[str, float]:
    return {"lookup_s": lookup, "update_s": update, "total_s": lookup + update, **more}


EMBEDDING_ROUNDS = [
    {
        "hotbed": seconds(1, 1, gather_s=0.5, scatter_s=0.5, limit_bytes=2e9),
        "hotbed_one_thread": seconds(2, 2),
        "fbgemm_default": seconds(4, 2),
        "plain": seconds(1, 3),
    },
    {
        "hotbed": seconds(2, 2, gather_s=1, scatter_s=2, limit_bytes=3e9),
        "hotbed_one_thread": seconds(2, 2),
        "fbgemm_default": seconds(4, 4),
        "plain": seconds(1, 1),
    },
    {
        "hotbed": seconds(1, 1, gather_s=1, scatter_s=0, limit_bytes=3e9),
        "hotbed_one_thread": seconds(2, 2),
        "fbgemm_default": seconds(6, 4),
        "plain": seconds(1, 5),
    },
]
STEP_ROUNDS = [
    {
        "hotbed": {"fp32_s": 2.0, "bf16_s": 1.0},
        "torchrec": {"fp32_s": 6.0, "bf16_s": 3.0},
        "plain": {"fp32_s": 8.0, "bf16_s": 5.0},
    }
]
RESULTS = {
    "embedding": report.embedding_summary(EMBEDDING_ROUNDS),
    "step": report.step_summary(STEP_ROUNDS, batch=100),
}


def test_a_ratio_is_of_one_round_and_the_median_of_rounds():
    summary = RESULTS["embedding"]
    assert [summary[f"ratio_fbgemm_default{end}"] for end in ("", "_min", "_max")] == [3, 2, 5]
    assert [summary[f"ratio_plain{end}"] for end in ("", "_min", "_max")] == [2, 0.5, 3]
    assert (summary["ratio_fbgemm_default_lookup"], summary["ratio_fbgemm_default_update"]) == (4, 2)
    assert summary["ratio_fbgemm_default_one_thread"] == 2
    assert "ratio_plain_one_thread" not in summary
    assert (summary["hotbed_s"], summary["fbgemm_default_lookup_s"]) == (2, 4)


def test_share_of_the_row_limit():
    summary = RESULTS["embedding"]
    assert [summary[f"share_of_row_limit{end}"] for end in ("", "_min", "_max")] == [0.5, 0.5, 0.75]
    assert [summary[f"row_limit_gb_s{end}"] for end in ("", "_min", "_max")] == [2, 1, 3]


def test_steps_say_which_precisions_they_compare():
    summary = RESULTS["step"]
    assert summary["ratio_torchrec_fp32"] == 6  # float32 ÷ hotbed's bf16
    assert summary["ratio_torchrec_fp32_like_for_like"] == 3
    assert summary["ratio_torchrec_bf16"] == 3
    assert summary["samples_per_s"] == 100
    names = {ratio: name for ratio, (name, _, _) in report.compared("step", summary).items()}
    assert names["ratio_torchrec_fp32"] == "TorchRec fp32, hotbed bf16"


def test_every_ratio_is_in_a_table():
    console = Console(width=120, record=True, file=io.StringIO())
    for section, summary in RESULTS.items():
        console.print(report.table(section, summary, "26 tables"))
    text = console.export_text()
    for shown in (
        "FBGEMM, as installed",
        "hotbed 1 thread",
        "3.00 (2.00–5.00)",
        "share: 0.50 (0.50–0.75)",
        "limit of random rows, 2.0 GB/s",
        "TorchRec fp32, hotbed bf16",
    ):
        assert shown in text


def test_every_figure_is_defined():
    patterns = [p for key in report.DEFINITIONS for p in key.split(", ")]
    for section, summary in RESULTS.items():
        for name in summary:
            bare = name.removesuffix("_min").removesuffix("_max")
            assert any(fnmatch.fnmatch(n, p) for p in patterns for n in (bare, f"{section}.{bare}")), name


def test_what_is_measured_later_is_added(tmp_path):
    path = tmp_path / "peers.json"
    workload = Workload(rows=50, dim=16)
    Results(path).add_rounds("embedding", workload, EMBEDDING_ROUNDS, {"commit": "a"})
    later = Results(path)
    later.add_rounds("step", workload, STEP_ROUNDS, {"commit": "b"})
    later.add("numerics", {"passed": True}, {"commit": "b"})
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [found["measured"][s]["commit"] for s in ("embedding", "step", "numerics")] == ["a", "b", "b"]
    assert found["embedding"] == RESULTS["embedding"] and found["step"]["ratio_torchrec_bf16"] == 3
    assert found["raw"] == {"embedding": EMBEDDING_ROUNDS, "step": STEP_ROUNDS}
    assert found["measured"]["step"]["workload"]["rows"] == 50


@pytest.mark.parametrize("rows", [50, (7, 50, 20)], ids=str)
@pytest.mark.parametrize("pooling", [1, 3])
def test_the_row_limit_is_measured_on_the_arena_and_leaves_it_as_it_is(pooling: int, rows: int | tuple[int, ...]):
    workload = Workload(rows=rows, dim=16, tables=3, batch=8, pooling=pooling)
    side = hotbed_side.Embedding(workload)
    before = [side.collection.weight(name).clone() for name in workload.names]
    ids = torch.stack([torch.arange(8 * pooling) % count for count in workload.rows_of_each]).flatten()
    gather, scatter, nbytes = side.row_limit([ids] * 6)
    assert gather > 0 and scatter > 0
    distinct = sum(min(8 * pooling, count) for count in workload.rows_of_each)
    assert nbytes == distinct * (3 * 16 * 4 + 2 * 4) + 2 * 3 * 8 * 16 * 4
    assert all(torch.equal(side.collection.weight(n), b) for n, b in zip(workload.names, before, strict=True))


def has_peers(python: Path) -> bool:
    look = "import sys, importlib.util as u; sys.exit(not (u.find_spec('fbgemm_gpu') and u.find_spec('torchrec')))"
    return python.exists() and subprocess.run([python, "-c", look], check=False).returncode == 0


def test_the_whole_comparison_tiny(tmp_path):
    python = next(filter(has_peers, (Path(sys.executable), OWN_PYTHON)), None)
    if python is None:
        pytest.skip("fbgemm_gpu and torchrec are not importable; `make bench-peers` installs them")
    file = tmp_path / "peers.json"
    command = [python, "-m", "benchmarks.peers", "--quick", "--rounds", "1", "--json", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(file.read_text(encoding="utf-8"))
    for ratio in ("fbgemm_default", "fbgemm_hugepages", "plain"):
        for section in ("embedding", "multi_hot", "narrow", "mixed", "weighted"):
            assert found[section][f"ratio_{ratio}"] > 0
    assert found["embedding"]["share_of_row_limit"] > 0
    assert found["step"]["samples_per_s"] > 0 and found["numerics"]["passed"]
    assert (tmp_path / "peers.png").exists()
    for name in ("ratio_torchrec_fp32", "ratio_torchrec_fp32_like_for_like", "ratio_torchrec_bf16", "samples_per_s"):
        assert found["step"][name] > 0
    assert found["numerics"]["passed"]
    assert {"sgd", "adagrad", "rowwise_adagrad"} <= {
        name for name, case in found["numerics"]["cases"].items() if case["outcome"] == "equal"
    }
    for section in ("world2", "world2_uniform"):
        for ratio in ("table", "row", "column", "column_apart", "table_hugepages"):
            assert found[section][f"ratio_{ratio}"] > 0
    assert found["world2_step"]["ratio_table_bf16"] > 0 and found["world2_step"]["samples_per_s_row"] > 0
    assert {scheme: case["outcome"] for scheme, case in found["numerics_world2"]["cases"].items()} == dict.fromkeys(
        ("table", "row", "column"), "equal"
    )
    assert set(found["raw"]) == set(WORKLOADS) and all(about["quick"] for about in found["measured"].values())
    assert file.with_suffix(".png").stat().st_size > 0

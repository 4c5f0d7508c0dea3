"""The comparison with TorchRec on two ranks: its arithmetic, its processes, and hotbed's side; needs no peer."""

from __future__ import annotations

import fnmatch
import io
import os

import pytest
import torch
from rich.console import Console

from benchmarks.peers import __main__ as peers
from benchmarks.peers import ranks, report
from benchmarks.peers.results import Results
from benchmarks.peers.sides import SHARDED_EMBEDDING_SIDES, SHARDED_STEP_SIDES, sides_of
from benchmarks.peers.worker import batches_needed
from benchmarks.peers.workloads import SHARDED, STEPS, WORKLOADS, read_ids, tiny, write_ids
from tests.matrix import full

FAILING = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("out of luck")
time.sleep(60)
"""


def seconds(lookup: float, update: float) -> dict[str, float]:
    return {"lookup_s": lookup, "update_s": update, "total_s": lookup + update}


EMBEDDING_ROUND = {
    "hotbed_table": seconds(1, 1),
    "torchrec_table": seconds(2, 4),
    "hotbed_row": seconds(1, 1),
    "torchrec_row": seconds(5, 5),
    "hotbed_column": seconds(1, 7),
    "torchrec_column": seconds(3, 1),
    "hotbed_column_apart": seconds(1, 1),
    "torchrec_table_hugepages": seconds(1, 2),
    "torchrec_row_hugepages": seconds(2, 2),
    "torchrec_column_hugepages": seconds(1, 1),
}
STEP_ROUND = {
    name: {"fp32_s": 2.0, "bf16_s": 1.0} if name.startswith("hotbed") else {"fp32_s": 6.0, "bf16_s": 5.0}
    for name in SHARDED_STEP_SIDES
} | {"hotbed_alone": {"fp32_s": 1.5, "bf16_s": 0.9}}
RESULTS = {
    "world2": report.embedding_summary([EMBEDDING_ROUND]),
    "world2_step": report.step_summary([STEP_ROUND], batch=100),
}


def test_ratios_are_by_scheme():
    summary = RESULTS["world2"]
    found = [summary[f"ratio_{scheme}"] for scheme in ("table", "row", "column", "column_apart")]
    assert found == [3, 5, 0.5, 2]
    assert (summary["ratio_table_lookup"], summary["ratio_table_update"]) == (2, 4)
    assert summary["ratio_table_hugepages"] == 1.5 and summary["ratio_column_apart_hugepages"] == 1
    assert "share_of_row_limit" not in summary
    steps = RESULTS["world2_step"]
    assert [steps[f"ratio_row_{end}"] for end in ("fp32", "fp32_like_for_like", "bf16")] == [6, 3, 5]
    assert steps["samples_per_s_column_apart"] == 100
    shares = [steps[f"sharding_share_row_{precision}"] for precision in ("fp32", "bf16")]
    assert shares == pytest.approx([0.25, 0.1])


def test_every_side_of_a_section_is_in_a_ratio():
    assert EMBEDDING_ROUND.keys() == SHARDED_EMBEDDING_SIDES.keys()
    for section, summary in RESULTS.items():
        seconds_of = {name for _, ours, theirs in report.compared(section, summary).values() for name in (ours, theirs)}
        ends = ("_fp32_s", "_bf16_s") if section in STEPS else ("_s",)
        assert seconds_of == {side + end for side in sides_of(section) if side != "hotbed_alone" for end in ends}


def test_what_is_compared_is_said():
    console = Console(width=140, record=True, file=io.StringIO())
    for section, summary in RESULTS.items():
        console.print(report.table(section, summary, str(WORKLOADS[section])))
    text = console.export_text()
    for shown in (
        "TorchRec table-wise, huge pages",
        "TorchRec column-wise, hotbed exact",
        "TorchRec column-wise, hotbed per shard",
        "TorchRec row-wise fp32, hotbed bf16",
        "TorchRec column-wise bf16, hotbed per shard bf16",
        "hotbed per shard, bf16; not sharded",
        "26 tables × 200,000 × 128, batch 4,096, 1 id per bag, 2 ranks",
    ):
        assert f"{shown} " in text
    assert "1 uniform id per bag" in str(WORKLOADS["world2_uniform"])


def test_every_figure_is_defined():
    patterns = [p for key in report.DEFINITIONS for p in key.split(", ")]
    for section, summary in RESULTS.items():
        assert section in patterns
        for name in summary:
            bare = name.removesuffix("_min").removesuffix("_max")
            assert any(fnmatch.fnmatch(n, p) for p in patterns for n in (bare, f"{section}.{bare}")), name


def test_results_know_sections_of_steps(tmp_path):
    results = Results(tmp_path / "peers.json")
    results.add_rounds("world2", SHARDED, [EMBEDDING_ROUND], {})
    results.add_rounds("world2_step", SHARDED, [STEP_ROUND], {})
    assert {section: results.data[section] for section in RESULTS} == {
        "world2": RESULTS["world2"],
        "world2_step": report.step_summary([STEP_ROUND], SHARDED.batch),
    }
    assert results.data["measured"]["world2"]["workload"]["ranks"] == 2


def test_ranks_share_each_batch(tmp_path):
    workload = tiny(WORKLOADS["world2"])
    write_ids(workload, 3, tmp_path / "ids.npy")
    whole = read_ids(tmp_path / "ids.npy")
    parts = [read_ids(tmp_path / "ids.npy", rank, 2) for rank in range(2)]
    assert len(whole) == 3 and workload.of_one_rank.batch == 32
    for batch, *own in zip(whole, *parts, strict=True):
        together = torch.cat([part.view(workload.tables, -1) for part in own], 1)
        assert torch.equal(together.flatten(), batch)


def test_uniform_ids_hardly_repeat(tmp_path):
    distinct: dict[str, int] = {}
    for section in ("world2", "world2_uniform"):
        write_ids(WORKLOADS[section], 1, tmp_path / "ids.npy")
        (ids,) = read_ids(tmp_path / "ids.npy")
        distinct[section] = sum(len(of_table.unique()) for of_table in ids.view(SHARDED.tables, -1))
    assert distinct["world2"] < 0.6 * len(ids) < 0.95 * len(ids) < distinct["world2_uniform"]


def test_a_rank_that_fails_is_named_and_the_others_are_killed(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING, encoding="utf-8")
    with pytest.raises(ranks.RankError, match=r"(?s)rank 1 failed with exit status 1.*out of luck"):
        ranks.launch(["failing"], 2, {**os.environ, "PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize(("section", "side"), [full("world2", "hotbed_column"), ("world2_step", "hotbed_row")])
def test_two_ranks_measure_hotbed(tmp_path, section, side):
    workload = tiny(WORKLOADS[section])
    kind = "step" if section in STEPS else "embedding"
    write_ids(workload, batches_needed(kind, workload), tmp_path / "ids.npy")
    found = peers.run_worker(kind, sides_of(section)[side], workload, tmp_path / "ids.npy")
    assert all(found[name] > 0 for name in (("fp32_s", "bf16_s") if kind == "step" else ("lookup_s", "update_s")))
    assert 0 <= peers.disturbance(workload, found) == found["others_share"]


def test_alone_nothing_is_exchanged():
    assert ranks.join() == (0, 1)
    ranks.wait_for_others()
    assert ranks.largest([[1.5, 2.0]]) == ranks.total([[1.5, 2.0]]) == [[1.5, 2.0]]
    ranks.leave()

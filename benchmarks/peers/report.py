"""From seconds per round to ratios, and from ratios to tables, a chart and definitions. Knows no contender."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

Round = Mapping[str, Mapping[str, float]]
"""What the workers of one round reported, by side."""

Results = Mapping[str, Mapping[str, float]]
"""Summaries by section: ``step``, and sections of embeddings."""

ONE_THREAD = ("fbgemm_default", "fbgemm_hugepages")
"""Peers that use one thread, whatever there is, and so are compared with hotbed on one thread, too."""

TIMES = {"": "total_s", "_lookup": "lookup_s", "_update": "update_s"}
"""Suffix of a ratio of embeddings → what it compares."""

STEP_RATIOS = {
    "ratio_torchrec_fp32": ("torchrec", "fp32", "bf16"),
    "ratio_torchrec_fp32_like_for_like": ("torchrec", "fp32", "fp32"),
    "ratio_torchrec_bf16": ("torchrec", "bf16", "bf16"),
    "ratio_plain_fp32": ("plain", "fp32", "bf16"),
    "ratio_plain_fp32_like_for_like": ("plain", "fp32", "fp32"),
    "ratio_plain_bf16": ("plain", "bf16", "bf16"),
}
"""Ratio of whole steps → peer, its precision, hotbed's precision."""

PEERS = {
    "fbgemm_default": "FBGEMM, as installed",
    "fbgemm_hugepages": "FBGEMM, huge pages",
    "plain": "plain PyTorch (SGD)",
    "torchrec": "TorchRec",
}

DEFINITIONS = {
    "ratio_*": "peer seconds ÷ hotbed seconds: how many times faster hotbed is. Median, smallest (_min) and largest "
    "(_max) over rounds; each ratio is of one round",
    "*_s": "seconds, median over rounds of the median step of each round",
    "embedding, multi_hot, narrow": "lookup, backward from a given gradient and update of all tables, sort included; "
    "hotbed and FBGEMM with exact row-wise AdaGrad, plain PyTorch with sparse SGD, which keeps no moment",
    "ratio_*_lookup, ratio_*_update": "the same for the lookup, and for backward and update",
    "ratio_*_one_thread": "against hotbed on one thread: FBGEMM's CPU wheel is compiled without OpenMP, so its "
    "operators run on one thread whatever torch is told; busy_cores of the raw figures shows it",
    "ratio_fbgemm_default": "FBGEMM's table-batched embeddings on the CPU as installed: pages as the system gives them",
    "ratio_fbgemm_hugepages": "the same with THP_MEM_ALLOC_ENABLE=1: transparent huge pages, for which hotbed always "
    "asks",
    "share_of_row_limit": "seconds that this machine needs to read one row per id at random, write the pooled vectors, "
    "read a gradient per bag and change each distinct row and its moment (hotbed.bench.limits) ÷ hotbed's seconds for "
    "lookup, backward and update; measured in the same process on the same memory",
    "step": "forward, loss, backward and update of a whole DLRM; row-wise AdaGrad on the tables (plain PyTorch: SGD), "
    "SGD on the MLPs",
    "step.ratio_*_fp32": "hotbed as recommended (bf16 autocast) against the peer as installed (float32): NOT the same "
    "precision",
    "step.ratio_*_fp32_like_for_like": "both in float32",
    "step.ratio_*_bf16": "both under torch.autocast('cpu', torch.bfloat16)",
    "step.samples_per_s": "hotbed under bf16 autocast",
    "numerics": "largest absolute difference of pooled vectors, rows and moments after the same steps in FBGEMM and in "
    "hotbed",
    "busy_cores": "processor seconds ÷ seconds of the timed steps; threads that wait for each other are busy, too",
    "cpu_wait_share": "seconds that threads of a worker waited for a core ÷ seconds it measured; large where other "
    "processes were in the way, and then the worker is run again (attempts)",
}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest as ``name``, ``name_min`` and ``name_max``."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def embedding_summary(rounds: Sequence[Round]) -> dict[str, float]:
    """Ratios to each peer, share of the row limit, and seconds."""
    summary: dict[str, float] = {}
    peers = [side for side in rounds[0] if not side.startswith("hotbed")]
    for ratio, peer, ours in [
        *((f"ratio_{peer}", peer, "hotbed") for peer in peers),
        *((f"ratio_{peer}_one_thread", peer, "hotbed_one_thread") for peer in peers if peer in ONE_THREAD),
    ]:
        for suffix, time in TIMES.items():
            summary |= spread(ratio + suffix, [r[peer][time] / r[ours][time] for r in rounds])
    limits = [r["hotbed"]["gather_s"] + r["hotbed"]["scatter_s"] for r in rounds]
    shares = [limit / r["hotbed"]["total_s"] for limit, r in zip(limits, rounds, strict=True)]
    summary |= spread("share_of_row_limit", shares) | spread("row_limit_s", limits)
    for side in rounds[0]:
        for suffix, time in TIMES.items():
            summary |= spread(f"{side}{suffix}_s", [r[side][time] for r in rounds])
    return summary


def step_summary(rounds: Sequence[Round], batch: int) -> dict[str, float]:
    """Ratios of `STEP_RATIOS`, samples per second, and seconds."""
    summary: dict[str, float] = {}
    for ratio, (peer, theirs, ours) in STEP_RATIOS.items():
        summary |= spread(ratio, [r[peer][f"{theirs}_s"] / r["hotbed"][f"{ours}_s"] for r in rounds])
    summary |= spread("samples_per_s", [batch / r["hotbed"]["bf16_s"] for r in rounds])
    for side in rounds[0]:
        for precision in ("fp32", "bf16"):
            summary |= spread(f"{side}_{precision}_s", [r[side][f"{precision}_s"] for r in rounds])
    return summary


def compared(section: str, summary: Mapping[str, float]) -> dict[str, tuple[str, str, str]]:
    """Ratios of a section → what to call the comparison, names of hotbed's and of the peer's seconds."""
    if section == "step":
        return {
            ratio: (f"{PEERS[peer]} {theirs}, hotbed {ours}", f"hotbed_{ours}_s", f"{peer}_{theirs}_s")
            for ratio, (peer, theirs, ours) in STEP_RATIOS.items()
        }
    peers = [peer for peer in PEERS if f"ratio_{peer}" in summary]
    return {f"ratio_{peer}": (PEERS[peer], "hotbed_s", f"{peer}_s") for peer in peers} | {
        f"ratio_{peer}_one_thread": (f"{PEERS[peer]}, hotbed 1 thread", "hotbed_one_thread_s", f"{peer}_s")
        for peer in peers
        if peer in ONE_THREAD
    }


def table(section: str, summary: Mapping[str, float], title: str) -> Table:
    """One row per ratio of a section."""

    def milliseconds(seconds: float) -> str:
        return f"{seconds * 1e3:.1f} ms"

    def shown(ratio: str) -> str:
        return f"{summary[ratio]:.2f} ({summary[f'{ratio}_min']:.2f}–{summary[f'{ratio}_max']:.2f})"

    embeddings = section != "step"
    heads = ("peer ÷ hotbed", *(("of lookups", "of updates") if embeddings else ()))
    made = Table(section, "hotbed", "peer", *heads, title=title, title_justify="left")
    for ratio, (name, ours, theirs) in compared(section, summary).items():
        parts = (f"{summary[ratio + suffix]:.2f}" for suffix in list(TIMES)[1:]) if embeddings else ()
        made.add_row(name, milliseconds(summary[ours]), milliseconds(summary[theirs]), shown(ratio), *parts)
    if embeddings:
        limit, share = milliseconds(summary["row_limit_s"]), shown("share_of_row_limit")
        made.add_row("limit of random rows", milliseconds(summary["hotbed_s"]), limit, f"share: {share}")
    return made


def numerics_table(numerics: Mapping[str, Any]) -> Table:
    """Outcome and largest difference of every optimizer."""
    made = Table("optimizer", "outcome", "largest difference", "", title="the same numbers as FBGEMM?")
    for name, case in numerics["cases"].items():
        difference = f"{case['max_abs_diff']:.1e}" if "max_abs_diff" in case else ""
        made.add_row(name, case["outcome"], difference, case.get("why", ""))
    return made


def chart(results: Results, titles: Mapping[str, str], path: Path) -> None:
    """Bars of all ratios with their smallest and largest, a panel per section; hotbed is the line at 1."""
    from matplotlib.figure import Figure  # only the benchmark's own environment has it

    bars = {section: compared(section, summary) for section, summary in results.items()}
    counts = [len(of_section) for of_section in bars.values()]
    figure = Figure(figsize=(9, 0.32 * sum(counts) + 0.6 * len(bars) + 0.4), layout="constrained")
    panels = figure.subplots(len(bars), sharex=True, squeeze=False, height_ratios=counts)[:, 0]
    for axes, (section, of_section) in zip(panels, bars.items(), strict=True):
        for place, ratio in enumerate(of_section):
            middle, low, high = (results[section][ratio + end] for end in ("", "_min", "_max"))
            mixed = section == "step" and STEP_RATIOS[ratio][1] != STEP_RATIOS[ratio][2]
            axes.barh(place, middle, color="tab:gray" if mixed else "tab:orange")
            axes.plot([low, high], [place, place], color="black", linewidth=1)
            axes.text(high, place, f" {middle:.1f}", va="center")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(range(len(of_section)), [name for name, _, _ in of_section.values()])
        axes.invert_yaxis()
        axes.set_title(f"{section}: {titles[section]}", loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    furthest = max(results[section][f"{ratio}_max"] for section, ratios in bars.items() for ratio in ratios)
    panels[-1].set_xlim(0, 1.08 * furthest)
    figure.supxlabel(
        "peer seconds ÷ hotbed seconds · line: smallest to largest · gray: unequal precisions", fontsize=10
    )
    figure.savefig(path, dpi=120)

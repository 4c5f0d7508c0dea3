"""From seconds per round to ratios, and from ratios to tables, a chart and definitions. Knows no contender."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.peers.workloads import STEPS

Round = Mapping[str, Mapping[str, float]]
"""What the workers of one round reported, by side."""

Results = Mapping[str, Mapping[str, float]]
"""Summaries by section of `WORKLOADS`."""

TIMES = {"": "total_s", "_lookup": "lookup_s", "_update": "update_s"}
"""Suffix of a ratio of embeddings → what it compares."""

SCHEMES = ("table", "row", "column", "column_apart")
"""Of hotbed's tables over ranks; `sides`."""

EMBEDDING_RATIOS = {
    "ratio_fbgemm_default": ("fbgemm_default", "hotbed"),
    "ratio_fbgemm_hugepages": ("fbgemm_hugepages", "hotbed"),
    "ratio_plain": ("plain", "hotbed"),
    "ratio_fbgemm_default_one_thread": ("fbgemm_default", "hotbed_one_thread"),
    "ratio_fbgemm_hugepages_one_thread": ("fbgemm_hugepages", "hotbed_one_thread"),
    **{
        f"ratio_{ours}{pages}": (f"torchrec_{peer}{pages}", f"hotbed_{ours}")
        for peer, ours in zip(("table", "row", "column", "column"), SCHEMES, strict=True)
        for pages in ("", "_hugepages")
    },
}
"""Ratio → peer, and which hotbed. FBGEMM uses one thread, whatever there is, so it is compared with one, too."""

SHARDED = {f"torchrec_{scheme}": f"TorchRec {scheme}-wise" for scheme in ("table", "row", "column")}
"""Peers that shard tables over ranks → what to call them."""

PRECISIONS = {"_fp32": ("fp32", "bf16"), "_fp32_like_for_like": ("fp32", "fp32"), "_bf16": ("bf16", "bf16")}
"""Suffix of a ratio of whole steps → precision of the peer, of hotbed."""

STEP_RATIOS = {
    ratio + suffix: (peer, ours, *precisions)
    for ratio, (peer, ours) in {
        "ratio_torchrec": ("torchrec", "hotbed"),
        "ratio_plain": ("plain", "hotbed"),
        **{ratio: sides for ratio, sides in EMBEDDING_RATIOS.items() if sides[0] in SHARDED},
    }.items()
    for suffix, precisions in PRECISIONS.items()
}
"""Ratio of whole steps → peer, which hotbed, precision of the peer, of hotbed."""

NAMES = {
    "fbgemm_default": "FBGEMM, as installed",
    "fbgemm_hugepages": "FBGEMM, huge pages",
    "plain": "plain PyTorch (SGD)",
    "torchrec": "TorchRec",
    **SHARDED,
    **{f"{peer}_hugepages": f"{name}, huge pages" for peer, name in SHARDED.items()},
    "hotbed_one_thread": "hotbed 1 thread",
    "hotbed_column": "hotbed exact",
    "hotbed_column_apart": "hotbed per shard",
}
"""What tables and the chart call a peer, and a hotbed that has to be told from another."""

DEFINITIONS = {
    "ratio_*": "peer seconds ÷ hotbed seconds: how many times faster hotbed is. Median, smallest (_min) and largest "
    "(_max) over rounds; each ratio is of one round",
    "*_s": "seconds, median over rounds of the median step of each round",
    "embedding, multi_hot, narrow, mixed, weighted": "lookup, backward from a given gradient and update of all tables, "
    "sort included; hotbed and FBGEMM with exact row-wise AdaGrad, plain PyTorch with sparse SGD without a moment",
    "ratio_*_lookup, ratio_*_update": "the same for the lookup, and for backward and update",
    "ratio_*_one_thread": "against hotbed on one thread: FBGEMM's CPU wheel is compiled without OpenMP, so its "
    "operators run on one thread whatever torch is told; busy_cores of the raw figures shows it",
    "ratio_fbgemm_default": "FBGEMM's table-batched embeddings on the CPU as installed: pages as the system gives them",
    "ratio_fbgemm_hugepages": "the same with THP_MEM_ALLOC_ENABLE=1: transparent huge pages, for which hotbed always "
    "asks",
    "share_of_row_limit": "seconds that this machine needs to read one row per id at random, write the pooled vectors, "
    "read a gradient per bag and change each distinct row and its moment (benchmarks/kernels/limits.py) ÷ hotbed's "
    "seconds for lookup, backward and update; measured in the same process on the same memory",
    "row_limit_gb_s": "bytes of each distinct row read, of it and its moment read and written, of a vector and of a "
    "gradient per bag ÷ these seconds",
    "step": "forward, loss, backward and update of a whole DLRM; row-wise AdaGrad on the tables (plain PyTorch: SGD), "
    "SGD on the MLPs",
    "step.ratio_*_fp32, world2_step.ratio_*_fp32": "hotbed as recommended (bf16 autocast) against the peer as "
    "installed (float32): NOT the same precision",
    "step.ratio_*_fp32_like_for_like, world2_step.ratio_*_fp32_like_for_like": "both in float32",
    "step.ratio_*_bf16, world2_step.ratio_*_bf16": "both under torch.autocast('cpu', torch.bfloat16)",
    "step.samples_per_s, world2_step.samples_per_s_*": "hotbed under bf16 autocast, in float32 where the "
    "processor has no instructions for bf16; at world size 2 by scheme",
    "world2, world2_uniform": "2 processes on this machine, one thread each, joined by Gloo over the loopback "
    "interface, half of the batch each; tables sharded over them. From a rank's ids to its pooled vectors and from a "
    "given gradient to updated rows, exchanges between the ranks included. Seconds of a step are those of its slower "
    "rank; both start together. Ids follow Zipf's law, or every row is as popular as any other: hotbed sends each "
    "distinct row once per rank, which helps where ids repeat",
    "world2_step": "the same for a whole step of the DLRM of `step`, whose MLPs are data-parallel (DDP) on both sides",
    "hotbed_alone*": "hotbed with all tables whole on each rank and no DDP: two processes beside each other that "
    "exchange nothing",
    "sharding_share_*": "1 − seconds of hotbed_alone ÷ seconds of the scheme, in the same precision: the share of a "
    "step that routes, exchanges of ids, rows and gradients (those of the MLPs, too) and all else that sharding adds "
    "take",
    "ratio_table*, ratio_row*, ratio_column*": "TorchRec and hotbed with all tables sharded table-, row- or "
    "column-wise, each the way it recommends: TorchRec with optimizers fused into backward, hotbed with wire format "
    "`rows`",
    "ratio_table_hugepages, ratio_row_hugepages, ratio_column*_hugepages": "TorchRec with THP_MEM_ALLOC_ENABLE=1",
    "ratio_column, ratio_column_hugepages, ratio_column_fp32*, ratio_column_bf16": "hotbed's row-wise AdaGrad is exact "
    "(a row has one moment, whoever holds its columns), TorchRec's has a moment per row and shard: NOT the same rule",
    "ratio_column_apart*": "hotbed with per_shard_statistics=True: a moment per row and shard, as in TorchRec",
    "numerics": "largest absolute difference of pooled vectors, rows and moments after the same steps in FBGEMM and in "
    "hotbed",
    "numerics_world2": "the same for TorchRec and hotbed on 2 ranks, by scheme (`column`: per_shard_statistics=True)",
    "busy_cores": "processor seconds of all ranks ÷ seconds of the timed steps; threads that wait for each other are "
    "busy, too",
    "cpu_wait_share": "seconds that threads of a worker waited for a core ÷ seconds it measured; large where other "
    "processes were in the way, and then a worker of one process is run again (attempts)",
    "others_share": "processor seconds that other processes used (or other machines, where this one is virtual) ÷ "
    "seconds a worker measured; decides whether a worker of several ranks is run again, which has more threads than "
    "there are cores",
    "build_s, cpu_wait_share, others_share, huge_page_bytes, peak_bytes": "where a worker has several ranks, the "
    "largest of any",
}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest as ``name``, ``name_min`` and ``name_max``."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def embedding_summary(rounds: Sequence[Round]) -> dict[str, float]:
    """Ratios of `EMBEDDING_RATIOS` whose sides were measured, share of the row limit if that was, and seconds."""
    summary: dict[str, float] = {}
    for ratio, (peer, ours) in EMBEDDING_RATIOS.items():
        if rounds[0].keys() >= {peer, ours}:
            for suffix, time in TIMES.items():
                summary |= spread(ratio + suffix, [r[peer][time] / r[ours][time] for r in rounds])
    if "gather_s" in rounds[0].get("hotbed", {}):
        limits = [r["hotbed"]["gather_s"] + r["hotbed"]["scatter_s"] for r in rounds]
        shares = [limit / r["hotbed"]["total_s"] for limit, r in zip(limits, rounds, strict=True)]
        summary |= spread("share_of_row_limit", shares) | spread("row_limit_s", limits)
        rates = [1e-9 * r["hotbed"]["limit_bytes"] / limit for limit, r in zip(limits, rounds, strict=True)]
        summary |= spread("row_limit_gb_s", rates)
    for side in rounds[0]:
        for suffix, time in TIMES.items():
            summary |= spread(f"{side}{suffix}_s", [r[side][time] for r in rounds])
    return summary


def step_summary(rounds: Sequence[Round], batch: int) -> dict[str, float]:
    """Ratios of `STEP_RATIOS` whose sides were measured, samples per second of each hotbed, and seconds."""
    summary: dict[str, float] = {}
    measured = [precision for precision in ("fp32", "bf16") if f"{precision}_s" in next(iter(rounds[0].values()))]
    for ratio, (peer, ours, peer_precision, our_precision) in STEP_RATIOS.items():
        if rounds[0].keys() >= {peer, ours} and {peer_precision, our_precision} <= set(measured):
            ratios = [r[peer][f"{peer_precision}_s"] / r[ours][f"{our_precision}_s"] for r in rounds]
            summary |= spread(ratio, ratios)
    for side in rounds[0]:
        if side.startswith("hotbed"):
            name = "samples_per_s" + side.removeprefix("hotbed")
            summary |= spread(name, [batch / r[side][f"{measured[-1]}_s"] for r in rounds])
        for precision in measured:
            summary |= spread(f"{side}_{precision}_s", [r[side][f"{precision}_s"] for r in rounds])
    for scheme in SCHEMES if "hotbed_alone" in rounds[0] else ():
        for precision in measured:
            time = f"{precision}_s"
            shares = [1 - r["hotbed_alone"][time] / r[f"hotbed_{scheme}"][time] for r in rounds]
            summary |= spread(f"sharding_share_{scheme}_{precision}", shares)
    return summary


def compared(section: str, summary: Mapping[str, float]) -> dict[str, tuple[str, str, str]]:
    """Ratios of a section → what to call the comparison, names of hotbed's and of the peer's seconds."""

    def called(peer: str, theirs: str, ours: str, mine: str) -> str:
        """Sides and precisions in words; a hotbed that need not be told from another only with its precision."""
        of_hotbed = NAMES.get(ours, "hotbed" if mine else "")
        return ", ".join(filter(None, (f"{NAMES[peer]} {theirs}".strip(), f"{of_hotbed} {mine}".strip())))

    if section in STEPS:
        return {
            ratio: (called(peer, theirs, ours, mine), f"{ours}_{mine}_s", f"{peer}_{theirs}_s")
            for ratio, (peer, ours, theirs, mine) in STEP_RATIOS.items()
            if ratio in summary
        }
    return {
        ratio: (called(peer, "", ours, ""), f"{ours}_s", f"{peer}_s")
        for ratio, (peer, ours) in EMBEDDING_RATIOS.items()
        if ratio in summary
    }


def table(section: str, summary: Mapping[str, float], title: str) -> Table:
    """One row per ratio of a section."""

    def milliseconds(seconds: float) -> str:
        return f"{seconds * 1e3:.1f} ms"

    def shown(ratio: str) -> str:
        return f"{summary[ratio]:.2f} ({summary[f'{ratio}_min']:.2f}–{summary[f'{ratio}_max']:.2f})"

    embeddings = section not in STEPS
    heads = ("peer ÷ hotbed", *(("of lookups", "of updates") if embeddings else ()))
    made = Table(section, "hotbed", "peer", *heads, title=title, title_justify="left")
    for ratio, (name, ours, theirs) in compared(section, summary).items():
        parts = (f"{summary[ratio + suffix]:.2f}" for suffix in list(TIMES)[1:]) if embeddings else ()
        made.add_row(name, milliseconds(summary[ours]), milliseconds(summary[theirs]), shown(ratio), *parts)
    if "row_limit_s" in summary:
        limit, share = milliseconds(summary["row_limit_s"]), shown("share_of_row_limit")
        name = f"limit of random rows, {summary['row_limit_gb_s']:.1f} GB/s"
        made.add_row(name, milliseconds(summary["hotbed_s"]), limit, f"share: {share}")
    for share in (name for name in summary if name.startswith("sharding_share_") and f"{name}_min" in summary):
        side, precision = share.removeprefix("sharding_share_").rsplit("_", 1)
        seconds = [milliseconds(summary[f"hotbed_{of}_{precision}_s"]) for of in (side, "alone")]
        name = NAMES.get(f"hotbed_{side}", f"hotbed {side}-wise")
        made.add_row(f"{name}, {precision}; not sharded", *seconds, f"share: {shown(share)}")
    return made


def numerics_table(numerics: Mapping[str, Any], what: str, title: str) -> Table:
    """Outcome and largest difference of every case."""
    made = Table(what, "outcome", "largest difference", "", title=title, title_justify="left")
    for name, case in numerics["cases"].items():
        difference = f"{case['max_abs_diff']:.1e}" if "max_abs_diff" in case else ""
        made.add_row(name, case["outcome"], difference, case.get("why", ""))
    return made


def chart(results: Results, titles: Mapping[str, str], path: Path) -> None:
    """Bars of all ratios with their smallest and largest, a panel per section; hotbed is the line at 1."""
    from matplotlib.figure import Figure  # only the benchmark's own environment has it

    bars = {section: compared(section, summary) for section, summary in results.items()}
    counts = [len(of_section) for of_section in bars.values()]
    figure = Figure(figsize=(11, 0.32 * sum(counts) + 0.6 * len(bars) + 0.4), layout="constrained")
    panels = figure.subplots(len(bars), sharex=True, squeeze=False, height_ratios=counts)[:, 0]
    for axes, (section, of_section) in zip(panels, bars.items(), strict=True):
        for place, ratio in enumerate(of_section):
            middle, low, high = (results[section][ratio + end] for end in ("", "_min", "_max"))
            mixed = section in STEPS and STEP_RATIOS[ratio][2] != STEP_RATIOS[ratio][3]
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

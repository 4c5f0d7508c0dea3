"""Compute ratios from the seconds of rounds, and print them. See the package's docstring for their definitions."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks import runner
from benchmarks.peers.workloads import STEPS

Round = Mapping[str, Mapping[str, float]]
"""What the workers of one round reported, by side."""
TIMES = {"": "total_s", "_lookup": "lookup_s", "_update": "update_s"}
"""The time of embeddings by the suffix of its ratio."""
SCHEMES = ("table", "row", "column", "column_apart")
SIDES = {
    "ratio_fbgemm_default": ("fbgemm_default", "hotbed"),
    "ratio_fbgemm_hugepages": ("fbgemm_hugepages", "hotbed"),
    "ratio_torchrec": ("torchrec", "hotbed"),
    "ratio_plain": ("plain", "hotbed"),
    "ratio_fbgemm_default_one_thread": ("fbgemm_default", "hotbed_one_thread"),
    "ratio_fbgemm_hugepages_one_thread": ("fbgemm_hugepages", "hotbed_one_thread"),
    **{
        f"ratio_{ours}{pages}": (f"torchrec_{peer}{pages}", f"hotbed_{ours}")
        for peer, ours in zip(("table", "row", "column", "column"), SCHEMES, strict=True)
        for pages in ("", "_hugepages")
    },
}
"""The peer and the hotbed of each ratio."""
PRECISIONS = {"_fp32": ("fp32", "bf16"), "_fp32_like_for_like": ("fp32", "fp32"), "_bf16": ("bf16", "bf16")}
"""The precision of the peer and of hotbed by the suffix of a ratio of whole steps."""


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return median, smallest and largest value as ``name``, ``name_min`` and ``name_max``."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def ratios(section: str, measured: Round) -> Iterator[tuple[str, tuple[str, str], tuple[str, str]]]:
    """Yield each ratio of the measured sides with (side, time) of the peer and of hotbed."""
    times = {key for of_side in measured.values() for key in of_side}
    for ratio, (peer, ours) in SIDES.items():
        if measured.keys() >= {peer, ours}:
            if section in STEPS:
                pairs = {suffix: (f"{theirs}_s", f"{mine}_s") for suffix, (theirs, mine) in PRECISIONS.items()}
            else:
                pairs = {suffix: (time, time) for suffix, time in TIMES.items()}
            for suffix, (theirs, mine) in pairs.items():
                if {theirs, mine} <= times:
                    yield ratio + suffix, (peer, theirs), (ours, mine)


def summary(section: str, rounds: Sequence[Round], batch: int) -> dict[str, float]:
    """Return ratios, shares of limits, rates and seconds of a section."""
    found: dict[str, float] = {}
    first = rounds[0]
    for ratio, (peer, theirs), (ours, mine) in ratios(section, first):
        found |= spread(ratio, [r[peer][theirs] / r[ours][mine] for r in rounds])
    if section not in STEPS:
        for side in first:
            for suffix, time in TIMES.items():
                found |= spread(f"{side}{suffix}_s", [r[side][time] for r in rounds])
        return found
    measured = [precision for precision in ("fp32", "bf16") if f"{precision}_s" in next(iter(first.values()))]
    for side in first:
        if side.startswith("hotbed"):
            rates = [batch / r[side][f"{measured[-1]}_s"] for r in rounds]
            found |= spread("samples_per_s" + side.removeprefix("hotbed"), rates)
        for precision in measured:
            time = f"{precision}_s"
            found |= spread(f"{side}_{time}", [r[side][time] for r in rounds])
            if "hotbed_alone" in first and side.removeprefix("hotbed_") in SCHEMES:
                shares = [1 - r["hotbed_alone"][time] / r[side][time] for r in rounds]
                found |= spread(f"sharding_share_{side.removeprefix('hotbed_')}_{precision}", shares)
    return found


def show(section: str, found: Mapping[str, float], rounds: Sequence[Round], title: str) -> None:
    rows: list[dict[str, object]] = []
    for ratio, (peer, theirs), (ours, mine) in ratios(section, rounds[0]):
        times = [1e3 * statistics.median(r[side][key] for r in rounds) for side, key in ((ours, mine), (peer, theirs))]
        value = f"{found[ratio]:.2f} ({found[f'{ratio}_min']:.2f}–{found[f'{ratio}_max']:.2f})"
        rows.append({"ratio": ratio, "hotbed, ms": times[0], "peer, ms": times[1], "peer ÷ hotbed": value})
    runner.show(f"{section}: {title}", rows)
    for name in (name for name in found if f"{name}_min" in found and "share" in name):
        print(f"{name}: {found[name]:.2f} ({found[f'{name}_min']:.2f}–{found[f'{name}_max']:.2f})")

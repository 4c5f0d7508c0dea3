"""Measure step time against bandwidth, for plans and codecs, on hosts joined by links with limits.

    python -m benchmarks.net [--limits 100 1000] [--ranks 2 4] [--plans table row column dp] [--json FILE] [--quick]
    python -m benchmarks.net --ranks 8 --plans row --codecs fp32 --groups 1 2 2:all 2/8   # one group against 2D

Every rank is a host of its own. Needs root and iproute2. The exit status is 1 if ranks sent other bytes than predicted
(more than 5 % apart), or if the links carried more than these and their framing. Results have:

``step_ms``        a step of the slowest rank: mean from one average to the next, median over these and over rounds
``payload_kb``     bytes that a rank gives to exchanges in a step, mean over ranks; ``predicted_kb`` by `traffic`
``sync_kb``        the part of the payload with which replicas are averaged, after every step or with M/K every K steps:
                   rows that any of them updated, or with :all all rows
``payload_ratio``  payload ÷ prediction, which leaves out counts and the randomness of ids
``wire_ratio``     bytes on the links ÷ payload, with all steps and the start of the processes
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import product
from typing import Any

from benchmarks import runner
from benchmarks.net.hosts import Hosts, available, run_ranks
from benchmarks.net.step_worker import BATCH, DIM, ROWS, TABLES
from hotbed.files import write_json

CODECS = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "bf16"), "int8 / bf16": ("int8", "bf16")}  # forward, backward
TOLERANCE = 0.05
FRAMING, STARTING_BYTES = 1.1, 1 << 20
"""Largest bytes on the links ÷ payload (headers are 1.046, plus acknowledgements), and bytes before the first step."""


def measure(
    ranks: int, limit: str, scheme: str, codec: str, groups: str, *, zipf: float, steps: int
) -> dict[str, float]:
    forward, backward = CODECS[codec]
    replicas, _, dense = groups.partition(":")
    count, _, every = replicas.partition("/")
    of_replicas = {"replicas": int(count), "sync_every": max(int(every or 1), 1), "dense_sync": dense == "all"}
    job = {"scheme": scheme, "forward": forward, "backward": backward, "zipf": zipf, "steps": steps, **of_replicas}
    with Hosts(ranks, None if limit == "none" else float(limit)) as hosts:
        found = run_ranks(hosts, [sys.executable, "-m", "benchmarks.net.step_worker", json.dumps(job)], 300)
        on_links = sum(hosts.sent_bytes())
    steps_done = found[0]["steps"]
    mean = {
        key: statistics.mean(rank[key] for rank in found) for key in ("sent_bytes", "predicted_bytes", "sync_bytes")
    }
    payload = mean["sent_bytes"]
    return {
        "step_ms": 1e3 * max(rank["step_s"] for rank in found),
        "payload_kb": payload / 1e3,
        "predicted_kb": mean["predicted_bytes"] / 1e3,
        "sync_kb": mean["sync_bytes"] / 1e3,
        "payload_ratio": payload / mean["predicted_bytes"],
        "wire_ratio": on_links / (payload * ranks * steps_done),
        "wire_ratio_limit": FRAMING + STARTING_BYTES / (payload * steps_done),
    }


def is_as_predicted(result: dict[str, Any]) -> bool:
    payload_is = abs(result["payload_ratio"] - 1) <= TOLERANCE
    return payload_is and 1 <= result["wire_ratio"] <= result["wire_ratio_limit"]


def main() -> int:
    parser = runner.arguments(__doc__)
    parser.add_argument("--limits", nargs="+", default=["100", "1000"], help="Mbit/s, or `none`.")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--plans", nargs="+", default=["table", "row", "column", "dp"])
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=list(CODECS))
    parser.add_argument("--groups", nargs="+", default=["1"], help="Replicas of the tables: M, M/K or M:all.")
    parser.add_argument("--zipf", type=float, default=0.0, help="Exponent of the popularity of ids (0: uniform).")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="One case, to see that everything runs.")
    args = parser.parse_args()
    if reason := available():
        print(f"cannot measure here: {reason}")
        return 1
    if args.quick:
        args.limits, args.ranks, args.plans, args.codecs, args.rounds, args.steps = (
            ["1000"],
            [2],
            ["row"],
            ["bf16"],
            1,
            2,
        )
    cases = list(product(args.ranks, args.limits, args.plans, args.codecs, args.groups))
    sides = {case: lambda case=case: measure(*case, zipf=args.zipf, steps=args.steps) for case in cases}
    found = runner.in_turns(sides, args.rounds, title="net")
    results = [
        dict(zip(("ranks", "limit_mbit", "plan", "codec", "groups"), case, strict=True))
        | {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for case, runs in found.items()
    ]
    ids = f"Zipf {args.zipf:g} ids" if args.zipf else "uniform ids"
    runner.show(f"{TABLES} tables × {ROWS:,} × {DIM}, {BATCH} samples per rank, {ids}", results)
    if args.json:
        write_json(args.json, {"results": results, "measured": runner.about(rounds=args.rounds, ids=ids)})
    return int(not all(map(is_as_predicted, results)))


if __name__ == "__main__":
    raise SystemExit(main())

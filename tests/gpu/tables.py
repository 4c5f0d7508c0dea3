"""Tables of what is known of compiled kernels: ours, TorchRec's, and the updates of whole batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np
import triton
from numpy.typing import NDArray

from . import machines
from .line import Line

WORKLOADS = {"26 tables, one id": (26, 1_000_000, 4096, 1), "4 tables, 20 ids": (4, 100_000, 8192, 20)}
"""Tables, rows, samples and ids per bag of the batches whose update is modelled."""
MAIN = "sm_90"


def ours(found: Sequence[Line]) -> str:
    """Render lines of all targets and Tritons as a row per kernel and conditions, and updates of batches."""
    here = [line for line in found if line.triton == triton.__version__]
    targets = list(dict.fromkeys(line.target for line in here))
    others = sorted({line.triton for line in found} - {triton.__version__})
    main = MAIN if MAIN in targets else targets[0]
    by = _numbered(found)
    # In-order machines stop where their code says: their waits are not those of the others.
    waits = [main, *(target for target in targets if target.startswith("gfx"))]
    head = ["kernel", "conditions", f"registers {' / '.join(targets)}"]
    head += [f"the same, Triton {other}" for other in others]
    head += ["spilled", "programs", "loads", f"waits {' / '.join(dict.fromkeys(waits))}", "KiB"]
    head += [f"share {' / '.join(targets)}", "need"]
    rows: list[list[str]] = []
    for (kernel, about, number, target, version), line in by.items():
        if (target, version) != (main, triton.__version__):
            continue

        def other(
            target: str,
            version: str = triton.__version__,
            key: tuple[str, str, int] = (kernel, about, number),
        ) -> Line | None:
            return by.get((*key, target, version))

        same = [other(target) for target in targets]
        with_others = [[other(target, version) for target in targets] for version in others]
        rows.append(
            [
                kernel,
                about,
                *(" / ".join(str(line.registers) if line else "–" for line in of) for of in (same, *with_others)),
                str(max(line.spilled_bytes for line in chain(same, *with_others) if line)),
                str(line.programs),
                _loads(line),
                " / ".join(_waits(other(target)) for target in dict.fromkeys(waits)),
                f"{line.kib_in_flight:.0f}",
                " / ".join(_percent(line.share if line else None) for line in same) if line.share else "–",
                _percent(line.need),
            ]
        )
    text = _table(head, rows)
    if modelled := updates(here):
        text += "\n\n" + batches(modelled)
    return text


def theirs(found: Sequence[Line]) -> str:
    """Render lines of TorchRec's kernels, and updates of batches by them."""
    head = ["kernel", "conditions", "target", "registers", "spilled", "programs", "loads", "waits", "KiB", "share"]
    rows = [
        [
            line.kernel,
            line.about,
            line.target,
            str(line.registers),
            str(line.spilled_bytes),
            str(line.programs),
            _loads(line),
            _waits(line),
            f"{line.kib_in_flight:.0f}",
            _percent(line.share),
        ]
        for line in found
    ]
    return _table(head, rows) + "\n\n" + batches(their_updates(found))


def updates(found: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Model a batch's update by float32 row-wise AdaGrad: share of the bandwidth by workload and columns."""
    result: dict[str, dict[str, float]] = {}
    for line in found:
        dim = int(line.about.split()[0]) if line.about[:1].isdigit() else 0
        if line.kernel != "runs, several" or line.about != f"{dim} fp32, rowwise_adagrad, gradient fp32":
            continue
        machine = machines.MACHINES[line.target]
        single = next(
            other
            for other in found
            if (other.kernel, other.about, other.target) == ("runs, single", line.about, line.target)
        )
        for name, workload in WORKLOADS.items():
            runs = machines.run_lengths(*workload)
            alone, several = runs[runs == 1], np.sort(runs[runs > 1])
            seconds = machines.tiles_s(machine, alone, single.tile, single.programs, single.chain, 0)
            seconds += machines.tiles_s(machine, several, line.tile, line.programs, line.chain, line.turn)
            result.setdefault(f"{line.target}, {dim} columns", {})[name] = _share(machine, runs, dim, seconds)
    return result


def their_updates(found: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Model the same updates by kernels whose programs take one run of up to 256 at a time, in any order."""
    result: dict[str, dict[str, float]] = {}
    for line in (line for line in found if line.kernel == "short runs"):
        machine, dim = machines.MACHINES[line.target], int(line.about.split()[0])
        for name, workload in WORKLOADS.items():
            runs = machines.run_lengths(*workload, longest=256)
            seconds = machines.tiles_s(machine, runs, 1, line.programs, line.chain, line.turn)
            result.setdefault(f"{line.target}, {dim} columns", {})[name] = _share(machine, runs, dim, seconds)
    return result


def batches(modelled: dict[str, dict[str, float]]) -> str:
    """Render the shares that batches of `WORKLOADS` can ask for."""
    rows = [[name, *(_percent(shares[workload]) for workload in WORKLOADS)] for name, shares in modelled.items()]
    return _table(["update, row-wise AdaGrad, fp32", *WORKLOADS], rows)


def _share(machine: machines.Machine, runs: NDArray[np.int64], dim: int, seconds: float) -> float:
    return (int(runs.sum()) + len(runs)) * dim * 4 / seconds / machine.bytes_per_s


def _numbered(found: Sequence[Line]) -> dict[tuple[str, str, int, str, str], Line]:
    """Lines by what they are of: a kernel may have several under the same conditions."""
    result: dict[tuple[str, str, int, str, str], Line] = {}
    so_far: Counter[tuple[str, str, str, str]] = Counter()
    for line in found:
        key = (line.kernel, line.about, line.target, line.triton)
        result[line.kernel, line.about, so_far[key], line.target, line.triton] = line
        so_far[key] += 1
    return result


def _loads(line: Line) -> str:
    return " ".join(f"{n}×{width}" for width, n in line.widths.items()) or "–"


def _waits(line: Line | None) -> str:
    if line is None:
        return "–"
    return f"{line.chain}" + (f" + {line.turn}" if line.turn else "")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

"""Choose forms and owners together by a mixed integer program, solved by HiGHS, for few tables and ranks.

Tiles of a form have equal costs. The variables are the number of tiles of a form on each rank ``n[f, r]`` (integer),
the use of a form ``y[f]`` (0 or 1), and the load of the busiest rank ``z``::

    minimize z + ε Σ y[f] · tiles[f]       where  Σ_f of a table y[f] = 1,   Σ_r n[f, r] = y[f] · tiles[f],
    Σ_f n[f, r] · load[f] + y[f] · everyone[f] + load[r] ≤ z,  Σ_f n[f, r] · bytes[f] + bytes[r] ≤ room
                                                                                    for every rank r
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from hotbed.plan.candidates import Form

MOST_VARIABLES = 600
"""Upper limit of variables."""
MOST_NODES = 200
"""Limit of search tree nodes. Unlike a time limit, it gives the same plan on fast and slow machines."""
GAP = 1e-3


def is_available() -> bool:
    """Return whether scipy is installed."""
    return find_spec("scipy") is not None


def solve(
    forms: Mapping[str, Sequence[Form]],
    size: int,
    room: int,
    loads: Sequence[float] | None = None,
    nbytes: Sequence[int] | None = None,
) -> list[tuple[Form, list[int]]] | None:
    """Return the form of each table with the owners of its tiles, or None if no solution was found within limits."""
    from scipy.optimize import (  # pyright: ignore[reportMissingImports]  # an extra
        Bounds,
        LinearConstraint,
        milp,
    )
    from scipy.sparse import coo_matrix  # pyright: ignore[reportMissingImports]

    flat = [form for of_table in forms.values() for form in of_table]
    count = len(flat)
    unit = max(sum(max(f.total for f in of_table) for of_table in forms.values()) / size, 1e-300)
    most_bytes = max(*(f.tile_bytes for f in flat), 1)

    def number(form: int, rank: int) -> int:
        return count + form * size + rank

    z = count * (1 + size)
    entries: list[tuple[int, int, float]] = []  # row, column, value
    low: list[float] = []
    high: list[float] = []

    def row(values: Sequence[tuple[int, float]], least: float, most: float) -> None:
        entries.extend((len(low), column, value) for column, value in values)
        low.append(least)
        high.append(most)

    first = 0
    for of_table in forms.values():
        row([(first + i, 1.0) for i in range(len(of_table))], 1, 1)
        first += len(of_table)
    for i, form in enumerate(flat):
        row([*((number(i, r), 1.0) for r in range(size)), (i, -float(form.tiles))], 0, 0)
    for r in range(size):
        own = [(number(i, r), f.largest / unit) for i, f in enumerate(flat)]
        everyone = [(i, f.everyone / unit) for i, f in enumerate(flat)]
        row([*own, *everyone, (z, -1.0)], -np.inf, -loads[r] / unit if loads is not None else 0)
        held = [(number(i, r), f.tile_bytes / most_bytes) for i, f in enumerate(flat)]
        row(held, -np.inf, (room - (nbytes[r] if nbytes is not None else 0)) / most_bytes)
    rows, columns, values = zip(*entries, strict=True)
    tiles = [form.tiles for form in flat]
    cost = np.concatenate([np.array(tiles) * 1e-6 / sum(tiles), np.zeros(count * size), [1.0]])
    upper = np.concatenate([np.ones(count), np.repeat(tiles, size), [np.inf]])
    matrix: Any = coo_matrix((values, (rows, columns)), shape=(len(low), z + 1)).tocsr()
    lower: Any = low  # scipy's type stubs have float, its documentation arrays
    higher: Any = high
    most: Any = upper
    least: Any = np.zeros(z + 1)
    result: Any = milp(
        cost,
        constraints=LinearConstraint(matrix, lower, higher),
        integrality=np.concatenate([np.ones(z), [0.0]]),
        bounds=Bounds(least, most),
        options={"node_limit": MOST_NODES, "mip_rel_gap": GAP},
    )
    if result.x is None:
        return None
    chosen: list[tuple[Form, list[int]]] = []
    for i, form in enumerate(flat):
        if result.x[i] > 0.5:
            owners = [r for r in range(size) for _ in range(round(result.x[number(i, r)]))]
            chosen.append((form, owners))
    return chosen

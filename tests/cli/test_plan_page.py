"""The page of ``hotbed plan --html``: what it says of the ranks that it shows, and curves that stay inside."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hotbed.cli.pages.plan_page import MOST_BARS, render_plan
from hotbed.plan.cost import RankCosts
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import Found, search
from hotbed.plan.simulation.simulate import Simulation, simulate
from hotbed.plan.simulation.sweep import Point, Sweep
from hotbed.plan.workload import Workload
from hotbed.specs import Table

pytest.importorskip("matplotlib", reason="needs the plot extra")
RANKS = 2 * MOST_BARS
SWEEP = Sweep.parse("ranks=64..256")


@pytest.fixture(scope="module")
def found() -> Found:
    return search(Workload.of([Table("users", 50_000, 32)], batch_size=RANKS), RANKS, Hardware.load("a100-40"))


@pytest.fixture(scope="module")
def simulation(found: Found) -> Simulation:
    return simulate(found.plan, found.costs, found.model)


def test_the_rank_with_most_bytes_is_shown_last_or_among_the_others(found: Found, simulation: Simulation) -> None:
    order = found.costs.load.argsort(kind="stable")[::-1].tolist()
    for fullest, words in (
        (
            order[0],
            f"A sample of {MOST_BARS - 1} of {RANKS} ranks",
        ),
        (order[1], "the idlest last but one. The last rank has the most bytes"),
    ):
        memory = {tier: nbytes.copy() for tier, nbytes in found.costs.memory.items()}
        memory["device"][fullest] = 10 * max(int(found.costs.nbytes.max()), 1)
        costs = RankCosts(memory, found.costs.parts_bytes, found.costs.parts)
        assert words in render_plan("shown", replace(found, costs=costs), simulation, SWEEP, [])


def test_curves_above_the_first_point_stay_in_the_drawing(found: Found, simulation: Simulation) -> None:
    rate = simulation.samples_per_s
    rates = {64: rate, 128: 50 * rate, 256: 9 * rate}
    points = [Point(n, n, replace(simulation, samples_per_s=value)) for n, value in rates.items()]
    drawn = render_plan("scaling", found, simulation, SWEEP, points).partition("<h2>Scaling</h2>")[2]
    width, height = (float(v) for v in re.findall(r'viewBox="0 0 (\S+) (\S+)"', drawn)[0])
    markers = drawn[drawn.index("clip-path") :]
    places = [
        (float(x), float(y)) for x, y in re.findall(r'<use [^>]*x="([^"]*)" y="([^"]*)" style="fill: #4878a8', markers)
    ]
    assert len(places) == 3 and all(0 < x < width and 0 < y < height for x, y in places)
    assert min(places, key=lambda place: place[1]) == places[1] and "2500%" in drawn

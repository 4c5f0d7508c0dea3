"""Which rank and which memory stores each part of each table?

A `Plan` (`tiling`) answers this question. `make_plan` cuts tables by a scheme (`schemes`), or searches for the fastest
plan: `candidates` are the cuts of a table, `milp` chooses one per table, `balance` assigns ranks, `bound` proves how
good the plan is, and `limits` checks memory. `cost` counts bytes and `step_time` seconds, on the hardware that
`hardware` describes. `hotbed.plan.simulation` predicts steps on hardware that is not present.
"""

from hotbed.plan.schemes import Cut
from hotbed.plan.search import make_plan
from hotbed.plan.tiling import Plan, Tile

__all__ = ["Cut", "Plan", "Tile", "make_plan"]

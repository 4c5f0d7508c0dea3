"""Which rank and which memory stores each part of each table?

A `Plan` answers this question. `make_plan` cuts tables by a scheme, or searches for the fastest plan.
"""

from hotbed.plan.schemes import Cut
from hotbed.plan.search import make_plan
from hotbed.plan.tiling import Plan, Tile

__all__ = ["Cut", "Plan", "Tile", "make_plan"]

"""Decide where every part of every table is stored: plans, and the schemes and searches that make them."""

from hotbed.plan.schemes import Cut
from hotbed.plan.search import make_plan
from hotbed.plan.tiling import Plan, Tile

__all__ = ["Cut", "Plan", "Tile", "make_plan"]

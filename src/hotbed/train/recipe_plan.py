"""Read what a recipe's ``parallel.plan`` says: a scheme, schemes by table, or a file with these or a whole plan."""

from __future__ import annotations

from typing import Any, cast

from hotbed.checkpoint.single_files import read_limited
from hotbed.config import ParallelRecipe
from hotbed.errors import PlanError
from hotbed.parsing import TextError, parse_json, parse_yaml
from hotbed.plan import Plan
from hotbed.plan.placement import AUTO, SCHEMES, Schemes, schemes_from


def plan_or_schemes(parallel: ParallelRecipe) -> Plan | Schemes:
    """What ``parallel.plan`` says: a scheme for all tables, schemes by table, or a file with these or a plan."""
    if isinstance(parallel.plan, dict):
        return schemes_from(parallel.plan, "parallel.plan")
    return parallel.plan if parallel.plan in (*SCHEMES, AUTO) else read_plan(parallel.plan)


def read_plan(file: str) -> Plan | Schemes:
    """A plan's file, or one with schemes by table, in JSON or YAML; a `PlanError` says what else a plan can be."""
    try:
        text = read_limited(file)
        values = parse_yaml(text.decode()) if file.endswith((".yaml", ".yml")) else parse_json(text)
    except FileNotFoundError:
        raise PlanError(
            f"there is no plan {file}; give a JSON or YAML file, or a scheme: {', '.join(SCHEMES)}, {AUTO}"
        ) from None
    except (TextError, ValueError) as error:
        raise PlanError(f"plan {file} {error}; give another file") from None
    if not isinstance(values, dict):
        raise PlanError(f"plan {file} holds {type(values).__name__}, must be a plan, or schemes by table")
    found = cast("dict[str, Any]", values)
    return Plan.from_dict(found) if {"tiles", "world_size"} & found.keys() else schemes_from(found, file)

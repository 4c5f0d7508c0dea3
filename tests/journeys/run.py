"""Run journeys; ``python -m tests.journeys.run [JOURNEY …]`` records their results anew.

Record only after a change that is meant to change results, and give the reason in the commit.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet as pq
import yaml

from hotbed.cli.main import main
from tests.journeys.inputs import write_inputs
from tests.serve.processes import running

HERE = Path(__file__).parent
JOURNEYS: dict[str, list[dict[str, Any]]] = yaml.safe_load((HERE / "journeys.yaml").read_text(encoding="utf-8"))

VOLATILE = re.compile(
    r"(^|_)(s|ms|seconds|at|time|date)$|\.pt2$|\.parquet$|^("
    r"run|path|hardware|host|cpu|cores|device|threads|torch|hotbed|python|platform|commit|"
    r"linear_library|precision_because|sha256|hashes|state|"
    r"process|kept heap|free_bytes|stall_share|read_bytes|ahead|ids_exchange_hidden_share)$"
)
"""Keys that depend on time, on the machine, on installed versions or on the order of prefetched reads.

So do sizes of programs of torch (``dense.pt2``) and of Parquet files.
"""
_RANKING = re.compile(r"recall|ndcg|auc", re.IGNORECASE)
"""Metrics that one pair of samples in another order moves by its whole share."""
RUN_TIME = re.compile(r"\d{8}-\d{6}")


def run_journey(name: str, folder: Path) -> list[dict[str, Any]]:
    """Run the commands of a journey in `folder`; return what each left: its JSON result and the kept files."""
    write_inputs(folder)
    with contextlib.chdir(folder):
        return [_run(step, number) for number, step in enumerate(JOURNEYS[name])]


def _run(step: Mapping[str, Any], number: int) -> dict[str, Any]:
    result = Path(f"result{number}.json")
    if "serve" in step:
        with running(step["serve"], "--port", "0") as server:
            answer = server.ask("POST", "/score", json.loads(Path(step["rows"]).read_text(encoding="utf-8")))
        return {"serve": step["serve"], "answer": stable(answer.json)}
    if "needs" in step and find_spec(step["needs"]) is None:
        return {"run": step["run"], "left out": step["needs"]}
    argv = [token for word in shlex.split(step["run"])[1:] for token in _expand(word)]
    if not step.get("no_json"):
        argv += ["--json", str(result)]
    found: dict[str, Any] = {"run": step["run"]}
    status, errors = _launch(argv, step["ranks"]) if "ranks" in step else _call(argv)
    if "fails" in step:
        assert status == 2, f"{step['run']}: exit status {status}, expected 2"
        assert step["fails"] in errors, f"{step['run']}: {errors!r} lacks {step['fails']!r}"
        return found
    assert status == 0, f"{step['run']}: exit status {status}: {errors}"
    if result.exists():
        values = json.loads(result.read_text(encoding="utf-8"))
        if "same" in step:
            before = json.loads(result.with_name(f"result{number - 1}.json").read_text(encoding="utf-8"))
            assert values[step["same"]] == before[step["same"]], f"{step['run']}: another {step['same']}"
        found["result"] = stable(values)
    for kept in step.get("keep", ()):
        found[kept] = _content(Path(kept))
    return found


def _expand(word: str) -> Iterator[str]:
    """Find the project's recipes, and replace the stars of a path by the newest that matches."""
    if word.startswith("recipes/"):
        word = str(HERE.parents[1] / word)
    if "*" not in word:
        yield word
        return
    matches = sorted(Path().glob(word))
    assert matches, f"no file matches {word}"
    yield str(matches[-1])


def _call(argv: Sequence[str]) -> tuple[int, str]:
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        status = main(argv)
    return status, errors.getvalue()


def _launch(argv: Sequence[str], ranks: int) -> tuple[int, str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, "-m", "hotbed", *argv], capture_output=True, text=True, check=False, env=env)
    return done.returncode, done.stderr


def _content(file: Path) -> Any:
    """Read a kept file: rows of tables by column, YAML and JSON by value."""
    if file.suffix in {".parquet", ".csv"}:
        table = pq.read_table(file) if file.suffix == ".parquet" else pyarrow.csv.read_csv(file)
        return {
            "schema": [str(field) for field in table.schema],
            "rows": table.slice(0, 8).to_pydict(),
            "n": len(table),
        }
    return stable(yaml.safe_load(file.read_text(encoding="utf-8")))


def stable(value: Any) -> Any:
    """Leave out what depends on time, on the machine or on installed versions."""
    if isinstance(value, dict):
        # Rows that wait for the writer of a file are counted in `table_bytes`, and their number depends on time.
        waiting = {"table_bytes"} if value.get("written_bytes") else set()
        return {key: stable(item) for key, item in value.items() if key not in waiting and not VOLATILE.search(key)}
    if isinstance(value, str):
        return RUN_TIME.sub("TIME", value).replace(f"{Path.cwd()}/", "")
    return [stable(item) for item in value] if isinstance(value, list) else value


def differences(found: Any, recorded: Any, where: str = "") -> list[str]:
    """List where two results differ; numbers may differ by the order of sums in matrix products."""
    if isinstance(found, dict) and isinstance(recorded, dict):
        keys = sorted(found.keys() | recorded.keys(), key=str)
        missing = object()
        return [
            line
            for key in keys
            for line in differences(found.get(key, missing), recorded.get(key, missing), f"{where}.{key}")
        ]
    if isinstance(found, list) and isinstance(recorded, list) and len(found) == len(recorded):
        return [
            line
            for number, pair in enumerate(zip(found, recorded, strict=True))
            for line in differences(*pair, f"{where}[{number}]")
        ]
    if isinstance(found, float) and isinstance(recorded, int | float):
        tolerance = 0.05 if _RANKING.search(where) else 1e-5
        same = math.isclose(found, recorded, rel_tol=1e-3, abs_tol=tolerance) or (
            math.isnan(found) and math.isnan(recorded)
        )
    else:
        same = found == recorded
    return [] if same else [f"{where}: {found!r}, recorded {recorded!r}"]


def record(names: Sequence[str]) -> None:
    """Run journeys and write their results to ``recorded``."""
    for name in names or JOURNEYS:
        with tempfile.TemporaryDirectory() as folder:
            lines = ",\n".join(json.dumps(step, default=str) for step in run_journey(name, Path(folder)))
        (HERE / "recorded" / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1:])

"""Measure models: options, the order of the runs, and the tables.

    python -m benchmarks.models quality --json benchmarks/results/models.json [--real_log LOG]
    python -m benchmarks.models rates --json benchmarks/results/model_rates.json
    python -m benchmarks.models table --json benchmarks/results/models.json --page docs/models.md

The file is written after each training, and what is in it is not repeated, so the same command goes on where it was
interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch and Numba are imported, here and in the processes

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.models import report
from benchmarks.models.logs import LOGS
from benchmarks.models.real import REAL_MODELS, real_runs
from benchmarks.models.retrieval import Retrieval
from benchmarks.models.training import BY_TASK, Clicks, draw
from benchmarks.pages import put_between
from benchmarks.quality_results import measured_on
from hotbed.files import write_json

MODELS_OF = {
    "crosses": ("DLRM", "DCNv2"),
    "pairs": ("DLRM", "DeepFM"),
    "slopes": ("DLRM", "DeepFM"),
    "conflict": ("DLRM", "MMoE", BY_TASK),
    "tasks": ("DLRM", "MMoE", BY_TASK),
    "interests": ("DLRM", "DIN"),
    "drift": ("DLRM", "HSTU", "SASRec", "DIN"),
    "order": ("DLRM", "HSTU", "SASRec"),
    "retrieval": Retrieval.models,
}
"""Logs in the order in which they are run, with the models that are trained on each."""
REAL = "real"
FINALISTS = 3
"""Trials of a model, the best on valid with one seed, that are trained with all seeds."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command."""
    args = _arguments(argv)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    args.run(args, console)


def quality(args: argparse.Namespace, console: Console) -> None:
    """Run what is missing, and print the tables."""
    settings = {"rows": args.rows, "items": args.items, "trials": args.trials, "seeds": args.seeds}
    data = _earlier(args.json, settings)
    data["about"]["measured on"] = measured_on()

    def save() -> None:
        if args.json is not None:
            write_json(args.json, data)

    with _progress(console) as progress:
        for name in args.logs:
            if name == REAL and args.real_log is None:
                console.print("real log skipped: its licence forbids shipping it; give yours as --real_log FILE")
            elif name == REAL:
                task = progress.add_task(REAL, total=len(REAL_MODELS) * args.seeds)
                with tempfile.TemporaryDirectory(prefix="hotbed-models-") as work:
                    for said in real_runs(args.real_log, Path(work), args.seeds, data["real"]):
                        console.print(said)
                        progress.advance(task)
                        save()
            else:
                models = [model for model in MODELS_OF[name] if args.models is None or model in args.models]
                task = progress.add_task(name, total=len(models) * (args.trials + FINALISTS * (args.seeds - 1)))
                of_log = data["planted"].setdefault(name, {})
                planted(_case(name, args), models, args, of_log, save, lambda t=task: progress.advance(t), console)
    _print(console, data)


def _case(name: str, args: argparse.Namespace) -> Clicks | Retrieval:
    if name == Retrieval.name:
        return Retrieval(args.items // 100, 4 * args.rows, min(400, args.rows // 10))
    return Clicks(LOGS[name](args.rows, args.rows // 4, args.rows // 2), MODELS_OF[name])


def planted(
    case: Clicks | Retrieval,
    models: Sequence[str],
    args: argparse.Namespace,
    found: dict[str, Any],
    save: Callable[[], None],
    advance: Callable[[], None],
    console: Console,
) -> None:
    """Search each model, train its best trials with the other seeds, and choose; each training is kept at once.

    The trials have seed 0, so each of the best is the first of its seeds. The one that is best on valid in the mean of
    all seeds is chosen: one alone may be lucky.
    """
    found["facts"] = case.facts
    found.setdefault("attainable", case.attainable())
    for name in models:
        model: dict[str, Any] = found.setdefault("models", {}).setdefault(name, {"trials": {}, "finalists": {}})
        trials, finalists = model["trials"], model.setdefault("finalists", {})
        for trial in map(str, range(args.trials)):
            if trial not in trials:
                trials[trial] = {"settings": asdict(draw(int(trial))), **case.run(name, draw(int(trial)), 0)}
                save()
            advance()
        for trial in sorted(trials, key=lambda of: -trials[of]["valid"])[:FINALISTS]:
            runs = finalists.setdefault(trial, {"0": trials[trial]})
            for seed in map(str, range(1, args.seeds)):
                if seed not in runs:
                    runs[seed] = case.run(name, draw(int(trial)), int(seed))
                    save()
                advance()
        model["best"] = max(finalists, key=lambda trial: sum(run["valid"] for run in finalists[trial].values()))
        model["seeds"] = finalists[model["best"]]
        reached = ", ".join(f"{score:.4f}" for score in report.seeds_of(model))
        console.print(
            f"{name}: trial {model['best']} of {args.trials}; {reached} of {found['attainable']['score']:.4f}"
        )
        save()


def table(args: argparse.Namespace, console: Console) -> None:
    """Print the tables of a file, and put them between the marks of a page."""
    data = json.loads(args.json.read_text(encoding="utf-8"))
    _print(console, data)
    if args.page is not None:
        put_between(args.page, report.BEGIN, report.END, report.markdown(data))


def rates(args: argparse.Namespace, console: Console) -> None:
    """Measure samples/s beside plain PyTorch."""
    from benchmarks.models.rates import measure

    measured = measure(args, console)
    if args.json is not None:
        write_json(args.json, {"about": {"measured on": measured_on()}, **measured})


def _print(console: Console, data: dict[str, Any]) -> None:
    shown = [("Planted logs, test split", report.PLANTED_HEADER, report.comparisons(data["planted"]))]
    if data["real"]:
        shown.append(("Real log, test split", report.REAL_HEADER, report.real_rows(data["real"])))
    for title, header, rows in shown:
        view = Table(*header, title=title)
        for row in rows:
            view.add_row(*row)
        console.print(view)
    for said in report.by_label(data["planted"]):
        console.print(said)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _earlier(file: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    if file is None or not file.exists():
        return {"settings": settings, "about": {}, "planted": {}, "real": {}}
    kept = json.loads(file.read_text(encoding="utf-8"))
    if kept["settings"] != settings:
        raise SystemExit(f"{file} was measured with {kept['settings']}, not {settings}; choose another --json")
    return kept


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_quality = commands.add_parser("quality", help="AUC and recall beside DLRM, and on the real log")
    of_quality.set_defaults(run=quality)
    names = (*MODELS_OF, REAL)
    of_quality.add_argument(
        "--logs", nargs="+", choices=names, default=list(names), metavar="LOG", help=", ".join(names)
    )
    of_quality.add_argument("--models", nargs="+", metavar="MODEL", help="only these of each log")
    of_quality.add_argument(
        "--rows", type=int, default=50_000, help="training samples of each planted log, a quarter of those of retrieval"
    )
    of_quality.add_argument("--items", type=int, default=100_000, help="of the log of retrieval")
    of_quality.add_argument("--trials", type=int, default=16, help="of each model's search")
    of_quality.add_argument("--seeds", type=int, default=3)
    of_quality.add_argument("--real_log", type=Path, help="a log in Criteo's layout, .tsv or .tsv.gz")
    of_quality.add_argument("--json", type=Path, help="results, written as they come; what is in it is not repeated")
    of_rates = commands.add_parser("rates", help="samples/s beside plain PyTorch")
    of_rates.set_defaults(run=rates)
    of_rates.add_argument("--batch", type=int, default=2_048)
    of_rates.add_argument("--rows", type=int, default=100_000, help="of each table")
    of_rates.add_argument("--dim", type=int, default=64)
    of_rates.add_argument("--length", type=int, default=50, help="most ids of a history")
    of_rates.add_argument("--features", type=int, default=26, help="of DCNv2")
    of_rates.add_argument("--steps", type=int, default=20, help="of one measurement, after a quarter as many more")
    of_rates.add_argument("--rounds", type=int, default=7, help="measurements of each side, in turns")
    of_rates.add_argument("--json", type=Path)
    of_table = commands.add_parser("table", help="the tables of a file")
    of_table.set_defaults(run=table)
    of_table.add_argument("--json", type=Path, required=True)
    of_table.add_argument("--page", type=Path, help="with marks, between which they are put")
    return parser.parse_args(argv)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    main()

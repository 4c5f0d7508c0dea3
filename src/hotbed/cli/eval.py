"""Evaluate a checkpoint's model: ``hotbed eval``."""

from __future__ import annotations

from argparse import Namespace

from hotbed.cli.arguments import Parser, add_json, add_trust, console, save_json
from hotbed.locations import location


def add_arguments(parser: Parser) -> None:
    """Add the checkpoint and the data."""
    parser.usage = "hotbed eval --checkpoint DIR [options]"
    parser.add_argument("--checkpoint", required=True, help="Checkpoint or run. RUNS/NAME is the newest run of a name.")
    parser.add_argument("--split", help="Split of the recipe's data (default: test, or all of --data).")
    parser.add_argument("--data", help="Data in the format of the recipe's data (default: the recipe's data).")
    add_trust(parser)
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Evaluate, and print the metrics."""
    from hotbed.train.runs.report import print_metrics
    from hotbed.train.runs.stored_model import evaluate_checkpoint

    checkpoint, split, metrics = evaluate_checkpoint(
        location(parsed.checkpoint), parsed.split, parsed.data, trust_recipe=parsed.trust_recipe
    )
    values = metrics.to_dict()
    data = split if parsed.data is None else f"{split} of {parsed.data}"
    print_metrics(console(), f"{checkpoint}: {data}, {metrics.samples:,} samples", values)
    save_json(parsed.json, {"checkpoint": str(checkpoint), split: values})

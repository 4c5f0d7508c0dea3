"""The file of results: what is measured later is added to it, each section with what it was measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers import report
from benchmarks.peers.workloads import STEPS, WORKLOADS, Workload


class Results:
    """Summaries by section, what ``numerics`` found, ``definitions``; by section what was ``measured`` on what, and the
    ``raw``.

    Parameters
    ----------
    path
        JSON file that every addition is written to; sections that are in it stay. None keeps results in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.data: dict[str, Any] = {}
        if path is not None and path.exists():
            self.data = json.loads(path.read_text(encoding="utf-8"))

    def add(self, section: str, summary: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Add a section, in place of an older one."""
        self.data[section] = dict(summary)
        self.data.setdefault("measured", {})[section] = dict(about)
        self.data["definitions"] = report.DEFINITIONS
        if self.path is not None:
            unfinished = self.path.with_name(f".{self.path.name}.unfinished")
            unfinished.write_text(json.dumps(self.data, indent=2) + "\n", encoding="utf-8")
            unfinished.replace(self.path)

    def add_rounds(
        self, section: str, workload: Workload, rounds: Sequence[report.Round], about: Mapping[str, Any]
    ) -> None:
        """Add what the workers of some rounds reported."""
        steps = section in STEPS
        summary = report.step_summary(rounds, workload.batch) if steps else report.embedding_summary(rounds)
        self.data.setdefault("raw", {})[section] = rounds
        self.add(section, summary, {**about, "workload": asdict(workload)})

    def draw(self, path: Path) -> None:
        """Draw all sections."""
        sections = [section for section in WORKLOADS if section in self.data]
        if sections:
            titles = {s: str(Workload(**self.data["measured"][s]["workload"])) for s in sections}
            report.chart({section: self.data[section] for section in sections}, titles, path)

"""Say what was measured on, and put it into pages, between two markers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from hotbed.files import write_text
from hotbed.train.runs.report import environment

ROOT = Path(__file__).resolve().parents[1]


def put_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two markers of a page, which stay, by a text with empty lines around it."""
    whole = page.read_text(encoding="utf-8")
    before, after = whole.split(begin)[0], whole.split(end)[1]
    write_text(page, f"{before}{begin}\n\n{text}\n\n{end}{after}")


def measured_on() -> str:
    """Commit, hardware and torch."""
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    about = environment(torch.device("cpu"))
    return f"commit {commit or 'unknown'}, {about['hardware']}, torch {about['torch']}"

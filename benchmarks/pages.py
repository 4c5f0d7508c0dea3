"""Put what was measured into pages, between two markers."""

from __future__ import annotations

from pathlib import Path

from hotbed.files import write_text


def put_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two markers of a page, which stay, by a text with empty lines around it."""
    whole = page.read_text(encoding="utf-8")
    before, after = whole.split(begin)[0], whole.split(end)[1]
    write_text(page, f"{before}{begin}\n\n{text}\n\n{end}{after}")

"""Look for bytes that a parser reads wrongly, led by coverage: ``make fuzz TARGET=plan SECONDS=600``; needs atheris.

What libFuzzer finds it writes into ``.fuzz/TARGET``; put it into ``tests/fuzz/corpus/TARGET``, where every run of the
tests reads it, and mend the parser.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

PARSERS = ["hotbed.parsing", "hotbed.plan.tiling", "hotbed.checkpoint", "hotbed.data.formats.split_binary", "yaml"]
"""Whose branches lead the search; all of hotbed would have its kernels compiled with them."""


def main(name: str, seconds: str) -> None:
    try:
        import atheris
    except ImportError as error:
        sys.exit(f"atheris cannot be imported ({error}); it has wheels for Linux: make fuzz installs one")
    with atheris.instrument_imports(include=PARSERS):
        from tests.fuzz.targets import CORPUS, TARGETS
    if name not in TARGETS:
        sys.exit(f"there is no target '{name}'; there are {', '.join(TARGETS)}")
    target, found = TARGETS[name], Path(".fuzz") / name
    found.mkdir(parents=True, exist_ok=True)
    if (CORPUS / name).is_dir():
        shutil.copytree(CORPUS / name, found, dirs_exist_ok=True)
    for seed, content in target.seeds().items():
        (found / seed).write_bytes(content)
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={found}/", "-rss_limit_mb=4096", str(found)]
    atheris.Setup([sys.argv[0], *options], lambda content: target.read(content) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])

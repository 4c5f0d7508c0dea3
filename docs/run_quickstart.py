"""Run the code of docs/quickstart.md with the installed ``hotbed``: ``python docs/run_quickstart.py FOLDER``."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path


def run(folder: Path) -> None:
    """Run the blocks of the page in order, in a new folder."""
    page = (Path(__file__).parent / "quickstart.md").read_text(encoding="utf-8")
    folder.mkdir(parents=True)
    for language, code in re.findall(r"^```(python|bash)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if language == "python":
            subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
            continue
        for line in code.splitlines():
            print("$", line, flush=True)
            program, *arguments = shlex.split(line)
            subprocess.run([Path(sys.executable).parent / program, *arguments], cwd=folder, check=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve())

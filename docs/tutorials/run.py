"""Execute the tutorials, in place: ``python docs/tutorials/run.py [NOTEBOOK …]``, by default all of them.

Each runs in a process of its own and in a temporary directory, so that nothing but its outputs stays. Those that need a
log generate one, or take the file, in Criteo's format, that the variable ``DATA`` names.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path, folder: Path, *, timeout: int = 600) -> nbformat.NotebookNode:
    """Execute a notebook by this Python, whatever kernels are installed, and return it with its outputs.

    Parameters
    ----------
    path
        The notebook; it is not changed.
    folder
        Where it runs.
    timeout
        Seconds that a cell may take.
    """
    notebook = nbformat.read(path, as_version=4)
    kernel = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout=timeout,
        startup_timeout=timeout,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(cleanup_kc=True)
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads leave the cores to other programs
    if log := os.environ.get("DATA"):
        os.environ["DATA"] = str(Path(log).resolve(strict=True))
    for path in parser.parse_args().notebooks:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        for cell in notebook.cells:  # what is said on stderr, such as that kernels are compiled, is of this machine
            if "outputs" in cell:
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - started:.0f} s, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()

"""Compile and load ``guard.cpp``; before PyTorch is imported, which asks for its devices once."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("guard.cpp")


def load_guard(folder: Path) -> None:
    """Make PyTorch's autograd believe in a CUDA device.

    Parameters
    ----------
    folder
        Where the compiled library is kept from run to run.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    libraries = [root / "lib" / name for name in ("libc10.so", "libtorch_cpu.so")]
    for library in (*libraries, _compiled(root, folder)):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _compiled(root: Path, folder: Path) -> Path:
    key = hashlib.sha256(_SOURCE.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()[:16]
    library = folder / f"guard-{key}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", str(_SOURCE), "-o", str(made)]
        subprocess.run(command, check=True)
        made.replace(library)
    return library

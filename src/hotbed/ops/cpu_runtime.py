# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""How Numba kernels are compiled, cached and launched.

*Cache.* Numba's on-disk cache does not notice an edited helper in another module, so the cache directory is named after
a hash of all kernel sources.

*Threads.* Kernels use ``torch.get_num_threads()`` threads. Two Python threads may launch kernels at once under OpenMP;
Numba's own ``workqueue`` layer would abort the process, so where OpenMP is missing launches take turns behind a lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from numba.core import event as numba_event
from torch import Tensor

PREFETCH_ROWS = 12
"""How many rows ahead kernels prefetch (8 to 32 measured equal within noise; see docs/log.md)."""


def _sources_hash() -> str:
    digest = hashlib.blake2b(digest_size=8)
    here = Path(__file__).parent
    for path in [*sorted(here.glob("cpu*.py")), here / "layout.py", here / "narrow.py"]:  # constants are compiled in
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cache_dir() -> Path:
    """In ``$NUMBA_CACHE_DIR`` or ``$XDG_CACHE_HOME/hotbed``; where that is read-only, a new temporary directory."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotbed"
    home = Path(os.environ.get("NUMBA_CACHE_DIR") or home) / f"numba-{_sources_hash()}"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # A new one, because what is in a cache is executed: others could have filled a predictable name.
        elsewhere = Path(tempfile.mkdtemp(prefix="hotbed-"))
        _log.warning("kernels are compiled anew by every process, into %s: %s", elsewhere, error)
        return elsewhere
    return home


_log = logging.getLogger("hotbed")
_CACHE_DIR = _cache_dir()


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with Numba at its first call, cached on disk; never with ``fastmath``."""

    def decorate(function: Callable[..., Any]) -> Any:
        previous = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(_CACHE_DIR)
        try:
            return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
        finally:
            numba.config.CACHE_DIR = previous

    return decorate


class _SayOnce(numba_event.Listener):
    """Tells the user why a first run takes longer: what is not in the cache is being compiled."""

    said = False

    def on_start(self, event: numba_event.Event) -> None:
        module = (event.data or {})["dispatcher"].py_func.__module__ or ""
        if not self.said and module.startswith(("hotbed.ops.", "hotbed.bench.")):  # the others are not cached
            self.said = True
            _log.warning("compiling CPU kernels, once for this machine and version; they are kept in %s", _CACHE_DIR)

    def on_end(self, event: numba_event.Event) -> None:
        """Nothing to say."""


numba_event.register("numba:compile", _SayOnce())


def _openmp_available() -> bool:
    try:
        from numba.np.ufunc import omppool  # noqa: F401
    except ImportError:
        return False
    return True


if numba.config.THREADING_LAYER == "default" and _openmp_available():
    numba.config.THREADING_LAYER = "omp"
_turns: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
if numba.config.THREADING_LAYER not in ("omp", "tbb"):
    _turns = threading.Lock()
    _log.warning(
        "Numba's threading layer is '%s', which cannot be entered twice: kernels started by two threads take turns; "
        "install libgomp1 for OpenMP",
        numba.config.THREADING_LAYER,
    )


def launch(compiled: Callable[..., Any], *args: Any) -> Any:
    """Run a parallel kernel on torch's number of threads, as far as Numba has as many (``NUMBA_NUM_THREADS``)."""
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)  # Numba's first start sets OpenMP's number of threads, which is torch's, too
    with _turns:
        return compiled(*args)


def flat(t: Tensor) -> Any:
    """A contiguous tensor as a flat array: float32 as it is, bfloat16 as its bits in uint16."""
    if t.dtype == torch.float16:  # which Numba does not know
        t = t.float()
    return (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).view(-1).numpy()

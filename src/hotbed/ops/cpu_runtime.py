# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Compile, cache and launch Numba kernels.

*Cache.* Numba's on-disk cache does not notice an edited helper in another module, so the cache directory is named after
a hash of all kernel sources, and all copies of the same sources share it. Of several processes that need a kernel which
is not there, one compiles it, and the others load what it wrote: the ranks of a first run would all spend the same
seconds on every kernel.

*Threads.* Kernels use ``torch.get_num_threads()`` threads. Two Python threads may launch kernels at once under OpenMP;
Numba's own ``workqueue`` layer would abort the process, so where OpenMP is missing launches take turns behind a lock.
A process that is forked has none of GNU OpenMP's threads, which would be waited for: there launches are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from numba.core import event as numba_event
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from torch import Tensor

from hotbed.errors import BackendError

PREFETCH_ROWS = 12
"""How many rows ahead kernels prefetch (8 to 32 measured equal within noise; see docs/log.md)."""


_HERE = Path(__file__).parent
_SOURCES = [*sorted(_HERE.glob("cpu*.py")), _HERE / "layout.py", _HERE / "rows.py", _HERE.parent / "specs.py"]
"""Files whose functions and constants are compiled into kernels."""


def _sources_hash() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in _SOURCES:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_home() -> Path:
    """Return where compiled kernels should be kept: ``$NUMBA_CACHE_DIR`` or ``$XDG_CACHE_HOME/hotbed``."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotbed"
    return Path(os.environ.get("NUMBA_CACHE_DIR") or home)


def _cache_dir() -> Path:
    """In `cache_home`; where that is read-only, a new temporary directory."""
    home = cache_home() / f"numba-{_sources_hash()}"
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


def kept_forms() -> set[Path]:
    """List the cached files of compiled kernels. Raise `BackendError` if `cache_home` is not writable."""
    if _CACHE_DIR.parent != cache_home():
        raise BackendError(
            f"{cache_home()} cannot be written, so every process compiles kernels anew; set XDG_CACHE_HOME or "
            "NUMBA_CACHE_DIR to a folder that can"
        )
    return set(_CACHE_DIR.glob("*.nbc"))


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with Numba at its first call, cached on disk; never with ``fastmath``."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(nogil=True, error_model="numpy", **options)(function)
        cache, compile_or_load = _SharedCache(function), compiled.compile

        def compile_once(signature: Any) -> Any:
            with global_compiler_lock, cache:
                return compile_or_load(signature)

        compiled._cache, compiled.compile = cache, compile_once
        return compiled

    return decorate


class _Locator:
    """Say where compiled forms of a function are: in the same place for all copies of the same source.

    Numba's own locators tell copies by their folder and the time of their files; see `numba.core.caching`.
    """

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        self._py_file, self._line = py_file, py_func.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(_CACHE_DIR)

    def ensure_cache_path(self) -> None:
        _CACHE_DIR.mkdir(parents=True, exist_ok=True)

    def get_source_stamp(self) -> str:
        return hashlib.blake2b(Path(self._py_file).read_bytes(), digest_size=8).hexdigest()

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func, py_file)


class _Forms(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012


class _SharedCache(FunctionCache):
    """Compiled forms of one kernel on disk, of which a process that finds one missing holds the lock until it is there.

    Kernels call kernels, never in a circle, so processes that hold several locks cannot wait for each other.
    """

    _impl_class = _Forms
    _lock: int | None = None

    def __enter__(self) -> None:
        """Take no lock yet: what is on disk is loaded without one."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None and self._lock is None and sys.platform != "win32":
            import fcntl

            self._impl.locator.ensure_cache_path()
            self._lock = os.open(_CACHE_DIR / f"{self._impl.filename_base}.lock", os.O_CREAT | os.O_RDWR, 0o600)
            # A lock of this process alone: what is forked from it meanwhile does not hold it, as with flock.
            with contextlib.suppress(OSError):  # a file system without locks: everybody compiles
                fcntl.lockf(self._lock, fcntl.LOCK_EX)
            found = super().load_overload(sig, target_context)  # another process may have compiled it meanwhile
        return found

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _SayOnce(numba_event.Listener):
    """Tells the user why a first run takes longer: what is not in the cache is being compiled."""

    said = False

    def on_start(self, event: numba_event.Event) -> None:
        module = (event.data or {})["dispatcher"].py_func.__module__ or ""
        if not self.said and module.startswith("hotbed.ops."):  # the others are not cached
            self.said = True
            _log.warning("compiling CPU kernels, once for this machine and version; they are kept in %s", _CACHE_DIR)

    def on_end(self, event: numba_event.Event) -> None:
        """Nothing to say."""


numba_event.register("numba:compile", _SayOnce())


REENTRANT = ("omp", "tbb")
"""Threading layers of Numba that two Python threads may enter at once."""


def _openmp_available() -> bool:
    try:
        from numba.np.ufunc import omppool  # noqa: F401
    except ImportError:
        return False
    return True


if numba.config.THREADING_LAYER == "default" and _openmp_available():
    numba.config.THREADING_LAYER = "omp"
_turns: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
if numba.config.THREADING_LAYER not in REENTRANT:
    _turns = threading.Lock()
    _log.warning(
        "Numba's threading layer is '%s', which cannot be entered twice: kernels started by two threads take turns; "
        "install libgomp1 for OpenMP",
        numba.config.THREADING_LAYER,
    )


def threading_layer() -> str:
    """Return the name of the threading layer that Numba's kernels use."""
    return str(numba.config.THREADING_LAYER)


class _OpenMP:
    """Whether kernels ran in this process, and whether they had run in the one that it was forked from."""

    has_run = False
    is_lost = False

    @classmethod
    def forked(cls) -> None:
        cls.is_lost = cls.is_lost or cls.has_run


if sys.platform == "linux" and numba.config.THREADING_LAYER == "omp":  # GNU's, whose threads a fork leaves behind
    os.register_at_fork(after_in_child=_OpenMP.forked)


def launch(compiled: Callable[..., Any], *args: Any) -> Any:
    """Run a parallel kernel on torch's number of threads, limited by ``NUMBA_NUM_THREADS``.

    Raise `BackendError` in a process that was forked after kernels had run, because Numba would kill it with a signal.
    """
    if _OpenMP.is_lost:
        raise BackendError(
            "this process was forked from one in which kernels had run, whose OpenMP threads it lacks; start it by "
            "multiprocessing.get_context('spawn'), or DataLoader(…, multiprocessing_context='spawn'), or before "
            "tables are made"
        )
    _OpenMP.has_run = True
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

# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Compile, cache and launch Numba kernels.

*Cache.* Numba's on-disk cache does not notice changes of a helper in another module. Therefore the name of the cache
directory has a hash of all kernel sources, and all copies of the same sources share the directory. If several processes
need a kernel that is not in the cache, one of them compiles it and the others load it. Otherwise, all ranks of a first
run would compile every kernel.

*Threads.* Kernels use ``torch.get_num_threads()`` threads. With OpenMP, two Python threads may launch kernels at the
same time. Numba's own ``workqueue`` layer would abort the process, so without OpenMP a lock serializes launches. A
forked process has no threads of GNU OpenMP and would wait for them forever, so launches raise an error in it.
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
"""Number of rows that kernels prefetch ahead (8 to 32 were equally fast)."""


_HERE = Path(__file__).parent
_SOURCES = [*sorted(_HERE.glob("cpu*.py")), _HERE / "layout.py", _HERE / "rows.py", _HERE.parent / "specs.py"]
"""Files with functions and constants that are compiled into kernels."""


def _hash_sources() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in _SOURCES:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_home() -> Path:
    """Return the preferred directory of compiled kernels: ``$NUMBA_CACHE_DIR`` or ``$XDG_CACHE_HOME/hotbed``."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotbed"
    return Path(os.environ.get("NUMBA_CACHE_DIR") or home)


def _create_cache_dir() -> Path:
    """Create a directory in `cache_home`, or a temporary directory if `cache_home` is read-only."""
    home = cache_home() / f"numba-{_hash_sources()}"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # Cached code is executed, so use an unpredictable name that other users cannot fill in advance.
        temporary = Path(tempfile.mkdtemp(prefix="hotbed-"))
        _log.warning("every process compiles kernels again, into %s: %s", temporary, error)
        return temporary
    return home


_log = logging.getLogger("hotbed")
_CACHE_DIR = _create_cache_dir()


def kept_forms() -> set[Path]:
    """List the cached files of compiled kernels. Raise `BackendError` if `cache_home` is not writable."""
    if _CACHE_DIR.parent != cache_home():
        raise BackendError(
            f"{cache_home()} is not writable, so every process compiles kernels again. Set XDG_CACHE_HOME or "
            "NUMBA_CACHE_DIR to a writable folder"
        )
    return set(_CACHE_DIR.glob("*.nbc"))


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with Numba at its first call, without ``fastmath``, and cache it on disk."""

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
    """Locates the compiled forms of a function in the same directory for all copies of the same source.

    Numba's own locators distinguish copies by folder and modification time, see `numba.core.caching`.
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
    """Compiled forms of one kernel on disk. A process locks a missing form until it has compiled the form.

    The calls between kernels have no cycle, so processes with several locks cannot deadlock.
    """

    _impl_class = _Forms
    _lock: int | None = None

    def __enter__(self) -> None:
        """Acquire no lock yet, because loading from disk does not need one."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None and self._lock is None and sys.platform != "win32":
            import fcntl

            self._impl.locator.ensure_cache_path()
            self._lock = os.open(_CACHE_DIR / f"{self._impl.filename_base}.lock", os.O_CREAT | os.O_RDWR, 0o600)
            # Forked children do not inherit a lock of lockf, unlike a lock of flock.
            with contextlib.suppress(OSError):  # on a file system without locks, every process compiles
                fcntl.lockf(self._lock, fcntl.LOCK_EX)
            found = super().load_overload(sig, target_context)  # another process may have compiled it meanwhile
        return found

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _CompileLogger(numba_event.Listener):
    """Logs once that kernels are being compiled, because the first run then takes longer."""

    has_logged = False

    def on_start(self, event: numba_event.Event) -> None:
        module = (event.data or {})["dispatcher"].py_func.__module__ or ""
        if not self.has_logged and module.startswith("hotbed.ops."):  # functions of other modules are not cached
            self.has_logged = True
            _log.warning("compiling CPU kernels once for this machine and version; they are cached in %s", _CACHE_DIR)

    def on_end(self, event: numba_event.Event) -> None:
        """Do nothing."""


numba_event.register("numba:compile", _CompileLogger())


REENTRANT = ("omp", "tbb")
"""Threading layers of Numba that two Python threads may use at the same time."""


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
        "Numba's threading layer '%s' does not support two Python threads, so a lock serializes kernels. Install "
        "libgomp1 for OpenMP",
        numba.config.THREADING_LAYER,
    )


def threading_layer() -> str:
    """Return the name of the threading layer that Numba's kernels use."""
    return str(numba.config.THREADING_LAYER)


class _OpenMP:
    """Records whether kernels ran in this process, and whether they ran in its parent before a fork."""

    has_run = False
    is_lost = False

    @classmethod
    def note_fork(cls) -> None:
        cls.is_lost = cls.is_lost or cls.has_run


if sys.platform == "linux" and numba.config.THREADING_LAYER == "omp":  # a fork does not copy GNU OpenMP's threads
    os.register_at_fork(after_in_child=_OpenMP.note_fork)


def launch(compiled: Callable[..., Any], *args: Any) -> Any:
    """Run a parallel kernel on torch's number of threads, limited by ``NUMBA_NUM_THREADS``.

    Raise `BackendError` in a process that was forked after kernels ran, because Numba would kill it with a signal.
    """
    if _OpenMP.is_lost:
        raise BackendError(
            "this process was forked after kernels ran, so it has no OpenMP threads. Start it with "
            "multiprocessing.get_context('spawn') or DataLoader(…, multiprocessing_context='spawn'), or fork before "
            "tables are created"
        )
    _OpenMP.has_run = True
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)  # Numba's first launch changes OpenMP's number of threads, which torch shares
    with _turns:
        return compiled(*args)


def flat(t: Tensor) -> Any:
    """Return a contiguous tensor as a flat array of float32, or of uint16 with the bits of bfloat16."""
    if t.dtype == torch.float16:  # Numba does not support it
        t = t.float()
    return (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).view(-1).numpy()

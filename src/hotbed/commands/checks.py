"""Look at what hotbed finds on this machine: what is there, what is missing, and what to do about it.

Nothing is changed, and nothing that is missing is an error: a library that cannot be imported is told as such. So no
module that a check is about is imported before its turn.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from hotbed.machine import OF_USERS, USER_DECIDED, cpu, release, usable_cores

State = Literal["ok", "absent", "problem"]
"""``absent`` is what hotbed does without; a ``problem`` makes it slow, or stops it."""

INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
"""Instruction sets that matter for speed."""
_LITTLE_DISK = 10 << 30
_QUERY_S = 10
"""Seconds that a program that is asked something has."""


class Check(NamedTuple):
    """What was found of one thing."""

    what: str  # its name
    state: State  # whether it is as it should be
    found: str  # what there is, in words
    advice: str = ""  # what to do; empty where nothing is to be done


def check_all(folder: Path, root: Path = Path("/")) -> list[Check]:
    """Make every check."""
    checks: dict[str, Callable[[], Check]] = {
        "hotbed": _python,
        "processor": lambda: _processor(root),
        "memory": _memory,
        "torch": _torch,
        "numba": _numba,
        "compiler cache": _cache,
        "triton": _triton,
        "backends": _backends,
        "GPU": _gpus,
        "collectives": _collectives,
        "OpenMP": _waiting,
        "huge pages": lambda: _huge_pages(root),
        "disk": lambda: _disk(folder),
        "open files": _open_files,
    }
    return [*(_safely(what, check) for what, check in checks.items()), *_extras()]


def _safely(what: str, check: Callable[[], Check]) -> Check:
    """Make a check; where a library cannot be used, that is what it found."""
    try:
        return check()
    except Exception as error:  # a broken library may raise anything
        reason = str(error).strip().splitlines()
        found = f"cannot be used: {type(error).__name__}: {reason[0] if reason else ''}"
        return Check(what, "problem", found, "install it again: pip install --force-reinstall hotbed")


# -- the machine ----------------------------------------------------------------------------------------------------


def _python() -> Check:
    here = f"hotbed {release()}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return Check("hotbed", "ok", here)


def _processor(root: Path) -> Check:
    seen, usable = os.cpu_count() or 1, usable_cores(root)
    sets = [name for name in INSTRUCTIONS if name in cpu(root).flags]
    of = f" of {seen}, by its control group or affinity" if usable < seen else ""
    return Check(
        "processor", "ok", f"{cpu(root).name}; {usable} cores{of}; {', '.join(sets) or 'no vector sets known'}"
    )


def _memory() -> Check:
    import torch

    from hotbed.store.memory import available_bytes

    free = available_bytes(torch.device("cpu"))
    return Check("memory", "ok", "unknown" if free is None else f"{free / 1e9:,.1f} GB can be allocated")


def _huge_pages(root: Path) -> Check:
    if sys.platform != "linux":
        return Check("huge pages", "absent", "only Linux has transparent huge pages")
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return Check("huge pages", "absent", f"{file} cannot be read; the kernel may have none")
    chosen = re.search(r"\[(\w+)\]", text)
    state = chosen[1] if chosen else text.strip()
    if state in ("always", "madvise"):
        return Check("huge pages", "ok", state)
    advice = f"as root: echo madvise > {file}; random rows of large tables are read up to twice as fast"
    return Check("huge pages", "problem", state, advice)


def _disk(folder: Path) -> Check:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free, total = shutil.disk_usage(there).free, shutil.disk_usage(there).total
    found = f"{free / 1e9:,.0f} of {total / 1e9:,.0f} GB are free where {there} is"
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return Check("disk", "problem", f"{found}, but nothing can be written ({error.strerror})", "name another DIR")
    if free < _LITTLE_DISK:
        return Check("disk", "problem", found, "free some space, or name another DIR")
    return Check("disk", "ok", found)


# -- libraries ------------------------------------------------------------------------------------------------------


def _torch() -> Check:
    import torch

    built = torch.version.cuda or torch.version.hip
    threads = torch.get_num_threads()
    return Check(
        "torch", "ok", f"{torch.__version__}, {f'for CUDA {built}' if built else 'for CPUs'}, {threads} threads"
    )


def _numba() -> Check:
    import numba

    from hotbed.ops import cpu_runtime

    layer = cpu_runtime.threading_layer()
    found = f"{numba.__version__}, threading layer {layer}"
    if layer not in cpu_runtime.REENTRANT:
        advice = "install libgomp1 (apt-get install libgomp1) for OpenMP; until then kernels of two threads take turns"
        return Check("numba", "problem", found, advice)
    return Check("numba", "ok", found)


def _cache() -> Check:
    from hotbed.ops import cpu_runtime

    wanted, used = cpu_runtime.cache_home(), cpu_runtime._CACHE_DIR
    advice = "make it writable, or set NUMBA_CACHE_DIR to a directory that is; else every process compiles anew"
    if not used.is_relative_to(wanted):
        return Check("compiler cache", "problem", f"{wanted} cannot be written", advice)
    try:
        tempfile.TemporaryFile(dir=used).close()
    except OSError as error:
        return Check("compiler cache", "problem", f"{used} cannot be written ({error.strerror})", advice)
    kernels = sum(1 for _ in used.glob("*.nbi"))
    found = f"{kernels} kernels in {used}" if kernels else f"{used} is empty: a first run compiles, for a minute or two"
    return Check("compiler cache", "ok", found)


def _triton() -> Check:
    version = _version("triton")
    if version is None:
        advice = "CUDA builds of torch bring it; for its interpreter: pip install 'hotbed[interpret]'"
        return Check("triton", "absent", "not installed; only GPUs need it", advice)
    missing = _missing_for_triton()
    if missing and _has_gpu():
        return Check("triton", "problem", f"{version}, but without {' and '.join(missing)}", _FOR_TRITON)
    return Check("triton", "ok", version + (f"; on GPUs it would need {' and '.join(missing)}" if missing else ""))


_FOR_TRITON = "it compiles a launcher for each kernel: apt-get install gcc python3-dev"


def _missing_for_triton() -> list[str]:
    compiler = any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang"))
    header = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    return [name for name, there in (("a C compiler", compiler), ("Python.h", header)) if not there]


def _backends() -> Check:
    from hotbed.errors import BackendError
    from hotbed.ops import backend

    devices = ["cpu", *(["cuda"] if _has_gpu() else [])]
    found: list[str] = []
    broken = ""
    for device in devices:
        try:
            found.append(f"{backend.select(device).NAME} on {device}")
        except (BackendError, ImportError) as error:
            broken = f"{device}: {error}"
    if broken:
        return Check("backends", "problem", broken, "see the lines on triton and numba; 'reference' runs anywhere")
    return Check("backends", "ok", f"{', '.join(found)}; reference on any device")


def _waiting() -> Check:
    set_by_user = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", *OF_USERS) if name in os.environ]
    if USER_DECIDED:
        return Check("OpenMP", "ok", f"threads wait as you have set: {', '.join(set_by_user)}")
    number = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in os.environ else ""
    return Check("OpenMP", "ok", "threads spin only shortly" + (f"; {number}" if number else ""))


# -- devices --------------------------------------------------------------------------------------------------------


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpus() -> Check:
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        shown = ", ".join(f"{d.name} ({d.total_memory / 1e9:,.0f} GB)" for d in devices)
        return Check("GPU", "ok", f"{len(devices)}: {shown}; driver {_driver() or 'unknown'}")
    if Path("/dev/nvidiactl").exists() or _driver():
        if torch.version.cuda is None:
            advice = "install a CUDA build of torch (https://pytorch.org/get-started/locally)"
            return Check("GPU", "problem", "there is one, but torch is built for CPUs", advice)
        advice = "compare the driver with the CUDA version of torch, and CUDA_VISIBLE_DEVICES"
        return Check("GPU", "problem", f"there is one, but torch {torch.version.cuda} cannot use it", advice)
    return Check("GPU", "absent", "none; training runs on the CPU")


def _driver() -> str:
    """Version of NVIDIA's driver; empty where there is none."""
    if (program := shutil.which("nvidia-smi")) is None:
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.split("\n")[0].strip() if asked.returncode == 0 else ""


def _collectives() -> Check:
    import torch.distributed as dist

    if not dist.is_available():
        return Check("collectives", "problem", "torch is built without torch.distributed", "install another build")
    there = [name for name, check in (("Gloo", dist.is_gloo_available), ("NCCL", dist.is_nccl_available)) if check()]
    if _has_gpu():
        if "NCCL" not in there:
            return Check(
                "collectives", "problem", f"{' and '.join(there)}, no NCCL for the GPUs", "install a CUDA build"
            )
        from torch.cuda import nccl

        there[-1] = "NCCL " + ".".join(map(str, nccl.version()))
    return Check("collectives", "ok", " and ".join(there))


# -- extras ---------------------------------------------------------------------------------------------------------

FOR_DEVELOPERS = ("dev", "docs", "testing", "interpret")
"""Extras that no user needs."""


def _open_files() -> Check:
    try:
        import resource
    except ImportError:  # Windows
        return Check("open files", "ok", "no limit is known here")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Check("open files", "problem", f"at most {soft:,}", f"ulimit -n {min(max(hard, soft), 65536)}")
    return Check("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}")


def _extras() -> Iterator[Check]:
    """Say of each extra which of its packages are missing."""
    for extra, packages in sorted(_by_extra("hotbed").items()):
        if extra in FOR_DEVELOPERS:
            continue
        missing = [name for name in packages if _version(name) is None]
        if missing:
            found = f"without {', '.join(missing)}"
            yield Check(f"extra {extra}", "absent", found, f"pip install 'hotbed[{extra}]'")
        else:
            yield Check(f"extra {extra}", "ok", ", ".join(f"{name} {_version(name)}" for name in packages))


def _by_extra(package: str) -> dict[str, list[str]]:
    """List the packages that each extra of an installed package needs, with those of extras that it names itself."""
    try:
        required = metadata.requires(package) or []
    except metadata.PackageNotFoundError:  # imported from src/, never installed
        return {}
    found: dict[str, list[str]] = {}
    for line in required:
        name = re.match(r"([\w.-]+)(?:\[([\w.,-]+)\])?", line)
        extra = re.search(r"extra == ['\"]([\w.-]+)['\"]", line)
        if name is None or extra is None or name[1] == package:
            continue
        inner = _by_extra(name[1]) if name[2] else {}
        found.setdefault(extra[1], []).extend(
            [name[1], *(p for of in (name[2] or "").split(",") for p in inner.get(of, []))]
        )
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

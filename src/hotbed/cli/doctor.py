"""Report what hotbed finds on this machine, and measure it: ``hotbed doctor [DIR] [--measure FILE]``.

No check changes anything, and a missing library is a finding rather than an error. Each check therefore imports the
library that it is about.
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
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hotbed.cli.arguments import Parser, add_json, check_json, console, write_json
from hotbed.config import Device
from hotbed.errors import RecipeError
from hotbed.locations import local
from hotbed.machine import OF_USERS, USER_DECIDED, cpu, fit_threads, release, usable_cores

if TYPE_CHECKING:
    from rich.console import Console

WIDE_SPREAD = 0.5
"""Spread from which a figure is doubted."""
MARKS = {"ok": "✓", "absent": "–", "problem": "✗"}
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
"""Instruction sets that matter for speed."""
FOR_DEVELOPERS = ("dev", "docs", "testing", "interpret")
"""Extras that no user needs."""
_LITTLE_DISK = 10 << 30
_QUERY_S = 10
"""Timeout of nvidia-smi."""


State = Literal["ok", "absent", "problem"]
Found = tuple[State, str] | tuple[State, str, str]
"""State, what was found, and advice."""


class Check(NamedTuple):
    """Result of one check. hotbed works without what is ``absent``; a ``problem`` makes it slow, or stops it."""

    what: str
    state: State
    found: str
    advice: str = ""  # what to do; empty if there is nothing to do


def add_arguments(parser: Parser) -> None:
    """Add the directory, and the options of measuring."""
    parser.usage = "hotbed doctor [DIR] [--measure FILE [--quick] [--device cpu] [--ranks [2,4]]] [--json FILE]"
    parser.add_argument("dir", nargs="?", default=".", help="Where runs and tables on disk would go.")
    parser.add_argument("--measure", help="Measure, for minutes, and write a hardware profile (YAML).")
    parser.add_argument("--quick", action="store_true", help="Measure less, in a fraction of the time.")
    parser.add_argument("--device", type=Device, default="auto", help="What is measured: auto, cpu or cuda.")
    parser.add_argument(
        "--ranks",
        type=list[int] | None,
        help="Numbers of processes between which exchanges are measured; default: [2,4], or 2, 4, … up to all GPUs.",
    )
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Check, print what was found, and measure."""
    folder = local("DIR", parsed.dir)
    if parsed.measure is None:
        for option in ("quick", "ranks"):
            if getattr(parsed, option):
                raise RecipeError(f"--{option} is for measuring; say where the profile goes with --measure FILE")
        checks = check_all(folder)
        print_checks(console(), checks)
        write_json(parsed.json, {"command": "doctor", "checks": [check._asdict() for check in checks]})
        return
    check_json(parsed.measure, "--measure")
    from hotbed.checkpoint.single_files import write_text_uri
    from hotbed.measure.machine_profile import MeasureOptions, measure
    from hotbed.parsing import yaml_text

    options = MeasureOptions(device=parsed.device, ranks=parsed.ranks, quick=parsed.quick)
    fit_threads()
    with _stages(console(stderr=True)) as tell:
        profile = measure(options, folder, tell)
    about = {key: profile[key] for key in profile if key != "figures"}
    write_text_uri(parsed.measure, f"{yaml_text(about)}\n{yaml_text({'figures': profile['figures']}, width=110)}\n")
    print_profile(console(), profile)
    console().print(f"profile: {parsed.measure}", soft_wrap=True)
    write_json(parsed.json, {"command": "doctor", "profile": profile})


@contextmanager
def _stages(to: Console) -> Generator[Callable[[str], None]]:
    """Show the current stage: on a terminal in one line, which no thread redraws, else in a line each."""
    if not to.is_terminal:
        yield lambda stage: to.print(f"{stage} …")
        return
    from rich.live import Live

    with Live(console=to, auto_refresh=False, transient=True) as live:
        yield lambda stage: live.update(f"{stage} …", refresh=True)


def print_profile(to: Console, profile: Mapping[str, Any]) -> None:
    """Print a line for each figure, and for each point of a curve, with its spread and its source."""
    from hotbed.cli.pages.report_page import Table, print_table
    from hotbed.plan.hardware import DIMENSIONS
    from hotbed.plan.quantities import show

    rows: list[list[str]] = []
    spreads: list[object] = []
    for name, entry in profile["figures"].items():
        about = entry if isinstance(entry, dict) else {"value": entry, "source": ""}
        spread_at = dict(_leaves(about.get("spread", {})))
        spreads += spread_at.values()
        for at, value in _leaves(about["value"]):
            shown = str(value) if isinstance(value, str | bool) else show(value, DIMENSIONS[name])
            spread = f"{spread_at[at]:.0%}" if spread_at.get(at) is not None else ""
            rows.append([f"{name} {at}".strip(), shown, spread, about["source"]])
    to.print(profile["description"], soft_wrap=True, highlight=False)
    print_table(to, Table("", ("figure", "value", "spread", "source"), rows, left=("source",)))
    if wide := sum(isinstance(spread, float) and spread > WIDE_SPREAD for spread in spreads):
        to.print(
            f"{wide} of {len(spreads)} figures differ by more than {WIDE_SPREAD:.0%} between repeats: something else "
            "was running; measure again on an idle machine",
            soft_wrap=True,
        )


def _leaves(value: Any, at: str = "") -> list[tuple[str, Any]]:
    """Return the values of a figure with their places in its curves."""
    if not isinstance(value, dict):
        return [(at, value)]
    return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{at} {key}".strip())]


def print_checks(to: Console, checks: Sequence[Check]) -> None:
    """Print a line for each check, and its advice below."""
    width = max(len(check.what) for check in checks)
    for check in checks:
        to.print(f"{MARKS[check.state]} {check.what:{width}}  {check.found}", soft_wrap=True, highlight=False)
        if check.advice:
            to.print(f"  {'':{width}}  → {check.advice}", soft_wrap=True, highlight=False)
    problems = sum(check.state == "problem" for check in checks)
    to.print("nothing is wrong" if not problems else f"{problems} to mend, marked {MARKS['problem']}")


# -- checks ---------------------------------------------------------------------------------------------------------


def check_all(folder: Path, root: Path = Path("/")) -> list[Check]:
    """Make every check."""
    checks: dict[str, Callable[[], Found]] = {
        "hotbed": lambda: (
            "ok",
            f"hotbed {release()}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        ),
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


def _safely(what: str, check: Callable[[], Found]) -> Check:
    """Make a check. A library that cannot be used is a finding."""
    try:
        state, found, *advice = check()
        return Check(what, state, found, *advice)
    except Exception as error:  # a broken library may raise anything
        reason = str(error).strip().splitlines()
        found = f"cannot be used: {type(error).__name__}: {reason[0] if reason else ''}"
        return Check(what, "problem", found, "install it again: pip install --force-reinstall hotbed")


def _processor(root: Path) -> Found:
    seen, usable = os.cpu_count() or 1, usable_cores(root)
    sets = ", ".join(name for name in INSTRUCTIONS if name in cpu(root).flags)
    of = f" of {seen}, by its control group or affinity" if usable < seen else ""
    return "ok", f"{cpu(root).name}; {usable} cores{of}; {sets or 'no vector sets known'}"


def _memory() -> Found:
    import torch

    from hotbed.store.memory import available_bytes

    free = available_bytes(torch.device("cpu"))
    return "ok", "unknown" if free is None else f"{free / 1e9:,.1f} GB can be allocated"


def _huge_pages(root: Path) -> Found:
    if sys.platform != "linux":
        return "absent", "only Linux has transparent huge pages"
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return "absent", f"{file} cannot be read; the kernel may have none"
    chosen = re.search(r"\[(\w+)\]", text)
    state = chosen[1] if chosen else text.strip()
    if state in ("always", "madvise"):
        return "ok", state
    return "problem", state, f"as root: echo madvise > {file}; random rows of large tables are read up to twice as fast"


def _disk(folder: Path) -> Found:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(there)
    found = f"{usage.free / 1e9:,.0f} of {usage.total / 1e9:,.0f} GB are free where {there} is"
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return "problem", f"{found}, but nothing can be written ({error.strerror})", "name another DIR"
    return ("problem", found, "free some space, or name another DIR") if usage.free < _LITTLE_DISK else ("ok", found)


def _open_files() -> Found:
    try:
        import resource
    except ImportError:  # Windows
        return "ok", "no limit is known here"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return "ok", "no limit"
    found = f"at most {soft:,}"
    return ("problem", found, f"ulimit -n {min(max(hard, soft), 65536)}") if soft < 1024 else ("ok", found)


def _waiting() -> Found:
    values = {name: os.environ[name] for name in ("OMP_NUM_THREADS", *OF_USERS) if name in os.environ}
    if USER_DECIDED:
        return "ok", f"threads wait as you have set: {', '.join(f'{name}={value}' for name, value in values.items())}"
    number = f"; OMP_NUM_THREADS={values['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in values else ""
    return "ok", f"threads spin only shortly{number}"


def _torch() -> Found:
    import torch

    built = torch.version.cuda or torch.version.hip
    of = f"for CUDA {built}" if built else "for CPUs"
    return "ok", f"{torch.__version__}, {of}, {torch.get_num_threads()} threads"


def _numba() -> Found:
    import numba

    from hotbed.ops import cpu_runtime

    layer = cpu_runtime.threading_layer()
    found = f"{numba.__version__}, threading layer {layer}"
    advice = "install libgomp1 (apt-get install libgomp1) for OpenMP; until then kernels of two threads take turns"
    return ("ok", found) if layer in cpu_runtime.REENTRANT else ("problem", found, advice)


def _cache() -> Found:
    from hotbed.ops import cpu_runtime

    wanted, used = cpu_runtime.cache_home(), cpu_runtime._CACHE_DIR
    advice = "make it writable, or set NUMBA_CACHE_DIR to a directory that is; else every process compiles anew"
    if not used.is_relative_to(wanted):
        return "problem", f"{wanted} cannot be written", advice
    try:
        tempfile.TemporaryFile(dir=used).close()
    except OSError as error:
        return "problem", f"{used} cannot be written ({error.strerror})", advice
    kernels = sum(1 for _ in used.glob("*.nbi"))
    empty = f"{used} is empty: a first run compiles, for a minute or two"
    return "ok", f"{kernels} kernels in {used}" if kernels else empty


def _triton() -> Found:
    version = _version("triton")
    if version is None:
        advice = "CUDA builds of torch bring it; for its interpreter: pip install 'hotbed[interpret]'"
        return "absent", "not installed; only GPUs need it", advice
    compiler = any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang"))
    header = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    missing = " and ".join(name for name, there in (("a C compiler", compiler), ("Python.h", header)) if not there)
    if missing and _has_gpu():
        advice = "it compiles a launcher for each kernel: apt-get install gcc python3-dev"
        return "problem", f"{version}, but without {missing}", advice
    return "ok", version + (f"; on GPUs it would need {missing}" if missing else "")


def _backends() -> Found:
    from hotbed.errors import BackendError
    from hotbed.ops import backend

    found: list[str] = []
    for device in ["cpu", *(["cuda"] if _has_gpu() else [])]:
        try:
            found.append(f"{backend.select(device).NAME} on {device}")
        except (BackendError, ImportError) as error:
            return "problem", f"{device}: {error}", "see the lines on triton and numba; 'reference' runs anywhere"
    return "ok", f"{', '.join(found)}; reference on any device"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpus() -> Found:
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        shown = ", ".join(f"{d.name} ({d.total_memory / 1e9:,.0f} GB)" for d in devices)
        return "ok", f"{len(devices)}: {shown}; driver {_driver() or 'unknown'}"
    if not Path("/dev/nvidiactl").exists() and not _driver():
        return "absent", "none; training runs on the CPU"
    if torch.version.cuda is None:
        advice = "install a CUDA build of torch (https://pytorch.org/get-started/locally)"
        return "problem", "there is one, but torch is built for CPUs", advice
    advice = "compare the driver with the CUDA version of torch, and CUDA_VISIBLE_DEVICES"
    return "problem", f"there is one, but torch {torch.version.cuda} cannot use it", advice


def _driver() -> str:
    """Return the version of NVIDIA's driver, or an empty text."""
    if (program := shutil.which("nvidia-smi")) is None:
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.split("\n")[0].strip() if asked.returncode == 0 else ""


def _collectives() -> Found:
    import torch.distributed as dist

    if not dist.is_available():
        return "problem", "torch is built without torch.distributed", "install another build"
    there = [name for name, check in (("Gloo", dist.is_gloo_available), ("NCCL", dist.is_nccl_available)) if check()]
    if _has_gpu():
        if "NCCL" not in there:
            return "problem", f"{' and '.join(there)}, no NCCL for the GPUs", "install a CUDA build"
        from torch.cuda import nccl

        there[-1] = "NCCL " + ".".join(map(str, nccl.version()))
    return "ok", " and ".join(there)


def _extras() -> Iterator[Check]:
    """Report which packages of each extra are missing."""
    for extra, packages in sorted(_by_extra("hotbed").items()):
        if extra in FOR_DEVELOPERS:
            continue
        if missing := ", ".join(name for name in packages if _version(name) is None):
            yield Check(f"extra {extra}", "absent", f"without {missing}", f"pip install 'hotbed[{extra}]'")
        else:
            yield Check(f"extra {extra}", "ok", ", ".join(f"{name} {_version(name)}" for name in packages))


def _by_extra(package: str) -> dict[str, list[str]]:
    """Return the packages that each extra of an installed package needs, also those of extras that it names."""
    try:
        required = metadata.requires(package) or []
    except metadata.PackageNotFoundError:  # imported from src/, never installed
        return {}
    found: dict[str, list[str]] = {}
    for line in required:
        name = re.match(r"([\w.-]+)(?:\[([\w.,-]+)\])?", line)
        extra = re.search(r"extra == ['\"]([\w.-]+)['\"]", line)
        if name is not None and extra is not None and name[1] != package:
            inner = _by_extra(name[1]) if name[2] else {}
            named = [p for of in (name[2] or "").split(",") for p in inner.get(of, [])]
            found.setdefault(extra[1], []).extend([name[1], *named])
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

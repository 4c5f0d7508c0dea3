"""Check what hotbed needs on this machine, or measure the machine: ``hotbed doctor [DIR] [--measure FILE]``.

Checks change nothing. A missing library is a finding, not an error, so each check imports its library itself.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hotbed.cli.arguments import Parser, add_json, check_json, console, save_json, why_not_writable
from hotbed.config import Device
from hotbed.errors import RecipeError
from hotbed.locations import local
from hotbed.machine import OF_USERS, USER_DECIDED, cpu, fit_threads, release, usable_cores

if TYPE_CHECKING:
    from rich.console import Console

WIDE_SPREAD = 0.5  # a figure is unreliable if its repeats differ by more than this share
MARKS = {"ok": "✓", "absent": "–", "problem": "✗"}
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # instruction sets that affect speed
FOR_DEVELOPERS = ("dev", "docs", "testing", "interpret")  # extras that are not checked, because users do not need them
_LOW_DISK = 10 << 30

State = Literal["ok", "absent", "problem"]
Finding = tuple[State, str] | tuple[State, str, str]  # state, finding and advice


class Check(NamedTuple):
    """Result of one check. hotbed works without ``absent`` things; a ``problem`` makes hotbed slow or stops it."""

    what: str
    state: State
    found: str
    advice: str = ""


def add_arguments(parser: Parser) -> None:
    """Add the directory, and the options of measuring."""
    parser.usage = "hotbed doctor [DIR] [--measure FILE [--quick] [--device cpu] [--ranks [2,4]]] [--json FILE]"
    parser.add_argument("dir", nargs="?", default=".", help="Directory of runs and of tables on disk, to be checked.")
    parser.add_argument("--measure", help="YAML file for a hardware profile. Measuring takes minutes.")
    parser.add_argument("--quick", action="store_true", help="Measure with fewer repeats, in a fraction of the time.")
    parser.add_argument("--device", type=Device, default="auto", help="Device to measure.")
    text = "Numbers of processes for measuring exchanges (default: [2,4]; on GPUs 2, 4, … up to all)."
    parser.add_argument("--ranks", type=list[int] | None, help=text)
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Check the machine, or measure it."""
    folder, to = local("DIR", parsed.dir), console()
    if parsed.measure is None:
        for option in ("quick", "ranks"):
            if getattr(parsed, option):
                raise RecipeError(f"--{option} works only with --measure. Add --measure FILE")
        checks = check_all(folder)
        width = max(len(check.what) for check in checks)
        for check in checks:
            to.print(f"{MARKS[check.state]} {check.what:{width}}  {check.found}", soft_wrap=True, highlight=False)
            if check.advice:
                to.print(f"  {'':{width}}  → {check.advice}", soft_wrap=True, highlight=False)
        problems = sum(check.state == "problem" for check in checks)
        to.print(f"{problems} problems, marked {MARKS['problem']}" if problems else "no problems")
        save_json(parsed.json, {"command": "doctor", "checks": [check._asdict() for check in checks]})
        return
    check_json(parsed.measure, "--measure")
    from hotbed.checkpoint.storage import write_text_uri
    from hotbed.measure.machine_profile import MeasureOptions, measure
    from hotbed.parsing import yaml_text

    fit_threads()
    with _show_stage(console(stderr=True)) as show:
        options = MeasureOptions(device=parsed.device, ranks=parsed.ranks, quick=parsed.quick)
        profile = measure(options, folder, show)
    about = {key: profile[key] for key in profile if key != "figures"}
    write_text_uri(parsed.measure, f"{yaml_text(about)}\n{yaml_text({'figures': profile['figures']}, width=110)}\n")
    print_profile(to, profile)
    to.print(f"profile: {parsed.measure}", soft_wrap=True)
    save_json(parsed.json, {"command": "doctor", "profile": profile})


@contextmanager
def _show_stage(to: Console) -> Generator[Callable[[str], None]]:
    if not to.is_terminal:
        yield lambda stage: to.print(f"{stage} …")
        return
    from rich.live import Live

    with Live(console=to, auto_refresh=False, transient=True) as live:  # a refresh thread would disturb measurements
        yield lambda stage: live.update(f"{stage} …", refresh=True)


def print_profile(to: Console, profile: Mapping[str, Any]) -> None:
    """Print each figure of a profile, and each point of a curve, with spread and source."""
    from hotbed.cli.pages.report_page import ReportTable, print_table
    from hotbed.plan.hardware import DIMENSIONS, format_quantity

    def leaves(value: Any, at: str = "") -> list[tuple[str, Any]]:
        if not isinstance(value, dict):
            return [(at, value)]
        return [leaf for key, inner in value.items() for leaf in leaves(inner, f"{at} {key}".strip())]

    rows: list[list[str]] = []
    spreads: list[object] = []
    for name, entry in profile["figures"].items():
        about = entry if isinstance(entry, dict) else {"value": entry, "source": ""}
        spread_at = dict(leaves(about.get("spread", {})))
        spreads += spread_at.values()
        for at, value in leaves(about["value"]):
            text = str(value) if isinstance(value, str | bool) else format_quantity(value, DIMENSIONS[name])
            spread = f"{spread_at[at]:.0%}" if spread_at.get(at) is not None else ""
            rows.append([f"{name} {at}".strip(), text, spread, about["source"]])
    to.print(profile["description"], soft_wrap=True, highlight=False)
    print_table(to, ReportTable("", ("figure", "value", "spread", "source"), rows, left=("source",)))
    if wide := sum(isinstance(spread, float) and spread > WIDE_SPREAD for spread in spreads):
        differ = f"{wide} of {len(spreads)} figures differ by more than {WIDE_SPREAD:.0%} between repeats"
        to.print(f"{differ}, probably because of other programs. Measure again on an idle machine", soft_wrap=True)


def check_all(folder: Path, root: Path = Path("/")) -> list[Check]:
    """Run every check."""
    python = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    checks: dict[str, Callable[[], Finding]] = {
        "hotbed": lambda: ("ok", f"hotbed {release()}, {python}"),
        "processor": lambda: _processor(root),
        "memory": _memory,
        "torch": _torch,
        "numba": _numba,
        "compiler cache": _cache,
        "triton": _triton,
        "backends": _backends,
        "GPU": _gpus,
        "collectives": _collectives,
        "OpenMP": _openmp,
        "huge pages": lambda: _huge_pages(root),
        "disk": lambda: _disk(folder),
        "open files": _open_files,
    }
    results: list[Check] = []
    for what, check in checks.items():
        try:
            state, found, *advice = check()
            results.append(Check(what, state, found, *advice))
        except Exception as error:  # a broken library may raise anything
            reason = str(error).strip().partition("\n")[0]
            found = f"the check failed: {type(error).__name__}: {reason}"
            results.append(Check(what, "problem", found, "reinstall hotbed: pip install --force-reinstall hotbed"))
    return [*results, *_extras()]


def _processor(root: Path) -> Finding:
    total, usable = os.cpu_count() or 1, usable_cores(root)
    sets = ", ".join(name for name in INSTRUCTIONS if name in cpu(root).flags)
    limit = f" of {total}, limited by control group or affinity" if usable < total else ""
    return "ok", f"{cpu(root).name}; {usable} cores{limit}; {sets or 'no vector sets known'}"


def _memory() -> Finding:
    import torch

    from hotbed.store.memory import available_bytes

    free = available_bytes(torch.device("cpu"))
    return "ok", "unknown" if free is None else f"{free / 1e9:,.1f} GB can be allocated"


def _huge_pages(root: Path) -> Finding:
    if sys.platform != "linux":
        return "absent", "only Linux has transparent huge pages"
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return "absent", f"{file} cannot be read, so the kernel may lack huge pages"
    state = text.partition("[")[2].partition("]")[0] or text
    if state in ("always", "madvise"):
        return "ok", state
    advice = f"run as root: echo madvise > {file}. Random rows of large tables are then read up to twice as fast"
    return "problem", state, advice


def _disk(folder: Path) -> Finding:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(existing)
    found = f"{usage.free / 1e9:,.0f} of {usage.total / 1e9:,.0f} GB are free at {existing}"
    if failure := why_not_writable(existing):
        return "problem", f"{found}, but this directory is not writable ({failure})", "pass a different DIR"
    return ("problem", found, "free some space, or pass a different DIR") if usage.free < _LOW_DISK else ("ok", found)


def _open_files() -> Finding:
    try:
        import resource
    except ImportError:  # Windows
        return "ok", "limit unknown"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}"
    return ("problem", found, f"ulimit -n {min(max(hard, soft), 65536)}") if 0 <= soft < 1024 else ("ok", found)


def _openmp() -> Finding:
    names = ("OMP_NUM_THREADS", *(OF_USERS if USER_DECIDED else ()))
    threads = "threads wait as set by the user" if USER_DECIDED else "threads spin briefly"
    return "ok", ", ".join([threads, *(f"{name}={os.environ[name]}" for name in names if name in os.environ)])


def _torch() -> Finding:
    import torch

    built = torch.version.cuda or torch.version.hip
    target = f"for CUDA {built}" if built else "for CPUs"
    return "ok", f"{torch.__version__}, {target}, {torch.get_num_threads()} threads"


def _numba() -> Finding:
    import numba

    from hotbed.ops import cpu_runtime

    layer = cpu_runtime.threading_layer()
    found = f"{numba.__version__}, threading layer {layer}"
    advice = "install OpenMP (apt-get install libgomp1); without OpenMP, kernels of two threads run one after the other"
    return ("ok", found) if layer in cpu_runtime.REENTRANT else ("problem", found, advice)


def _cache() -> Finding:
    from hotbed.ops import cpu_runtime

    wanted, used = cpu_runtime.cache_home(), cpu_runtime._CACHE_DIR
    advice = (
        "make it writable, or set NUMBA_CACHE_DIR to a writable directory; otherwise every process compiles kernels"
    )
    if not used.is_relative_to(wanted):
        return "problem", f"{wanted} is not writable", advice
    if failure := why_not_writable(used):
        return "problem", f"{used} is not writable ({failure})", advice
    empty = f"{used} is empty: the first run compiles for a minute or two"
    return "ok", f"{kernels} kernels in {used}" if (kernels := len([*used.glob("*.nbi")])) else empty


def _triton() -> Finding:
    version = _version("triton")
    if version is None:
        advice = "install a CUDA build of torch, which contains Triton, or only Triton: pip install 'hotbed[interpret]'"
        return "absent", "not installed; only GPUs need Triton", advice
    compiler = any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang"))
    header = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    missing = " and ".join(name for name, found in (("a C compiler", compiler), ("Python.h", header)) if not found)
    if missing and _has_gpu():
        advice = "Triton compiles the launchers of kernels with these: apt-get install gcc python3-dev"
        return "problem", f"{version}, but without {missing}", advice
    return "ok", version + (f"; on GPUs it would need {missing}" if missing else "")


def _backends() -> Finding:
    from hotbed.errors import BackendError
    from hotbed.ops import backend

    found: list[str] = []
    for device in ["cpu", *(["cuda"] if _has_gpu() else [])]:
        try:
            found.append(f"{backend.select(device).NAME} on {device}")
        except (BackendError, ImportError) as error:
            return (
                "problem",
                f"{device}: {error}",
                "fix the problems of triton or numba; the backend 'reference' always works",
            )
    return "ok", f"{', '.join(found)}; reference on any device"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpus() -> Finding:
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = ", ".join(f"{d.name} ({d.total_memory / 1e9:,.0f} GB)" for d in devices)
        return "ok", f"{len(devices)}: {names}; driver {_driver() or 'unknown'}"
    if not Path("/dev/nvidiactl").exists() and not _driver():
        return "absent", "none; training runs on the CPU"
    if torch.version.cuda is None:
        advice = "install a CUDA build of torch (https://pytorch.org/get-started/locally)"
        return "problem", "a GPU exists, but torch is built for CPUs", advice
    advice = "install a driver for torch's CUDA version, and check CUDA_VISIBLE_DEVICES"
    return "problem", f"a GPU exists, but torch {torch.version.cuda} cannot use it", advice


def _driver() -> str:
    """Return the version of NVIDIA's driver, or an empty text."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()


def _collectives() -> Finding:
    import torch.distributed as dist

    if not dist.is_available():
        return "problem", "torch is built without torch.distributed", "install a build of torch that has it"
    found = [name for name, check in (("Gloo", dist.is_gloo_available), ("NCCL", dist.is_nccl_available)) if check()]
    if _has_gpu():
        if "NCCL" not in found:
            return "problem", f"{' and '.join(found)}, no NCCL for the GPUs", "install a CUDA build of torch"
        from torch.cuda import nccl

        found[-1] = "NCCL " + ".".join(map(str, nccl.version()))
    return "ok", " and ".join(found)


def _extras() -> Iterator[Check]:
    for extra, packages in sorted(_by_extra("hotbed").items()):
        if extra in FOR_DEVELOPERS:
            continue
        if missing := ", ".join(name for name in packages if _version(name) is None):
            yield Check(f"extra {extra}", "absent", f"without {missing}", f"pip install 'hotbed[{extra}]'")
        else:
            yield Check(f"extra {extra}", "ok", ", ".join(f"{name} {_version(name)}" for name in packages))


def _by_extra(package: str) -> dict[str, list[str]]:
    """Return, for each extra of a package, the packages that the extra installs.

    They include the packages of other packages' extras that the extra requires.
    """
    try:
        required = metadata.requires(package) or []
    except metadata.PackageNotFoundError:  # imported from src/, never installed
        return {}
    found: dict[str, list[str]] = {}
    for line in required:
        match = re.match(r"([\w.-]+)(?:\[([\w.,-]+)\])?.*extra == ['\"]([\w.-]+)['\"]", line)
        if match and match[1] != package:
            name, nested, extra = match.groups()
            inner = _by_extra(name) if nested else {}
            found.setdefault(extra, []).append(name)
            found[extra] += [p for of in (nested or "").split(",") for p in inner.get(of, [])]
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

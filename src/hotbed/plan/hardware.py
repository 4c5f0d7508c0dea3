"""Describe machines in numbers: memories, links, arithmetic and fixed costs.

A machine is *nodes* of equal ranks. A rank has a device with its own memory. With ``cores_shared``, the ranks of a node
share its cores and memory instead, and the device's figures describe the whole node.

Figures come from built-in profiles, or from files of the user, e.g. of ``hotbed doctor --measure FILE``. These are YAML
files with a unit and a source for every figure. Rates are reached rates, not nominal ones::

    description: 8 × A100-40, 200 Gbit/s per GPU
    sources:
      gpu: NVIDIA A100 datasheet, https://…
      neo: Mudigere et al. 2021, arXiv 2104.05158, appendix A
    extends: a100-40                     # a built-in profile with the other figures
    figures:
      device_bytes: {value: 40 GB, source: gpu}
      stream: {peak: 1555 GB/s, share: 0.84, source: [gpu, neo]}       # the nominal rate, and the reached share
      gather: {peak: 1555 GB/s, share: {128: 0.6, 512: 0.8}, source: neo}     # by bytes of a row
      host_link: 25 GB/s                 # figures of the user's own files need no source

Quantities have units, e.g. ``1.3 TB/s``, ``200 Gbit/s``, ``40 GiB``, ``5 us``, ``156 TFLOP/s``. Kilo is 1,000 and kibi
1,024. A plain number is in bytes, bytes/s, FLOP/s or seconds.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from hotbed.checks import Count, NotNegative, Positive, Range, Section, Size, check, check_known, naming
from hotbed.errors import HotbedError, PlanError, RecipeError
from hotbed.files import read_yaml
from hotbed.machine import memory_bytes, usable_cores

if TYPE_CHECKING:
    import torch

PROFILES = Path(__file__).parent / "profiles"
"""Folder of the built-in profiles."""
GPUS = {"A100": "a100-80", "H100": "h100", "H200": "h200", "B200": "b200"}
"""Profiles by a part of the GPU's name; memory is measured on the present GPU."""
CPU = "epyc-7742x2"

Dimension = Literal["bytes", "bytes/s", "FLOP/s", "s", "number"]
DIMENSIONS: Mapping[str, Dimension] = {
    **dict.fromkeys(("ranks_per_node", "cores_per_node"), "number"),
    **dict.fromkeys(("device_bytes", "host_bytes", "disk_bytes"), "bytes"),
    **dict.fromkeys(("stream", "gather", "scatter"), "bytes/s"),
    "flops": "FLOP/s",
    **dict.fromkeys(("host_stream", "host_link", "disk_read"), "bytes/s"),
    "disk_latency": "s",
    **dict.fromkeys(("node_link", "network"), "bytes/s"),
    **dict.fromkeys(("network_efficiency", "oversubscription"), "number"),
    **dict.fromkeys(("message_s", "launch_s"), "s"),
    **dict.fromkeys(("all_to_all", "all_reduce"), "bytes/s"),
    "overheads": "s",
    "efficiency": "number",
    "mlp": "FLOP/s",
    "price_per_hour": "number",
}
"""Dimension of each figure."""
COUNTS = ("ranks_per_node", "cores_per_node", "device_bytes", "host_bytes", "disk_bytes")
"""Figures that are whole numbers."""
_FIGURES = (*DIMENSIONS, "cores_shared")
_BY_RANKS = ("all_to_all", "all_reduce", "mlp")
_TOP: dict[str, Any] = {"description": str, "sources": dict, "measured": bool, "figures": dict, "extends": str}
_ENTRY = ("value", "peak", "share", "source", "spread")

DTYPES = ("fp32", "tf32", "bf16", "fp16")
"""Dtypes of matrix products."""
OVERHEADS = (
    *("step", "arena", "table", "layer", "copies", "sums", "average", "host", "disk"),  # of a step
    *("id", "host_row", "disk_row"),  # of an id, and of a row outside the device's memory
    "average_row",  # of a row that two replicas average, in addition to its bytes
    *("bf16", "fp16", "fp8", "int8"),  # of a value that a codec encodes and decodes
)
"""Keys of `Hardware.overheads`; `hotbed.measure.step_overheads` explains how each is measured."""

Curve = Mapping[int, float]
"""Rates by bytes of a row or of a message."""
_Ranks = Annotated[int, Range(least=1, name="a number of ranks")]
_Bytes = Annotated[int, Range(least=1, name="a number of bytes")]
_Operations = Annotated[int, Range(least=1, name="a number of operations")]
_Curve = Mapping[_Bytes, Positive]
_Share = Annotated[float, Range(above=0, most=1)]


@dataclass(frozen=True, kw_only=True)
class Hardware(Section, error=RecipeError):
    """Figures of a machine, in bytes, bytes/s, FLOP/s and seconds; rates are reached rates, not nominal ones."""

    name: str  # of the built-in profile, or of the file
    description: str = ""
    sources: tuple[str, ...] = ()
    """Sources of the figures."""
    origins: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """Value and names of sources by figure, as in the profile, except for changed figures."""
    measured: bool = False
    """Whether the figures were measured on the machine itself."""
    ranks_per_node: Count
    """Ranks with a common host: GPUs, or processes on its cores."""
    device_bytes: Count
    """Memory of a rank's device, or with ``cores_shared`` the common memory of a node's ranks."""
    host_bytes: Count
    """Host memory of a node."""
    disk_bytes: Size = 0
    """Size of a node's local disks; 0 without disks."""
    stream: Positive
    """Sequential reads and writes of device memory."""
    gather: _Curve
    """Random lookups by bytes of a row: bytes of read rows and written vectors ÷ seconds."""
    scatter: _Curve
    """Random updates by bytes of a row: bytes of read gradients, and of read and written rows and moments, ÷ seconds.
    Grouping is included, unless ``overheads`` has it as ``id``."""
    flops: Mapping[str, Positive]
    """Large matrix products, by dtype: fp32, tf32, bf16, fp16."""
    host_stream: Positive
    """Sequential reads and writes of a node's host memory."""
    host_link: Positive
    """Link between a rank's device and the host's memory, in one direction."""
    disk_read: NotNegative = 0.0
    """Concurrent random reads of 4 KiB from a node's disks; 0 without disks."""
    disk_latency: NotNegative = 0.0
    """Latency of one random read of 4 KiB."""
    node_link: Positive
    """Link from a rank to other ranks of its node, in one direction."""
    network: Positive
    """Nominal rate of a rank's share of the node's network cards, in one direction."""
    network_efficiency: _Share = 1.0
    """Share of ``network`` that collectives reach."""
    oversubscription: Annotated[float, Range(least=1)] = 1.0
    """Bandwidth of nodes into the network ÷ bandwidth of the network between them; 1 for a non-blocking network."""
    message_s: NotNegative
    """Fixed cost of a message to one other rank."""
    launch_s: NotNegative
    """Fixed cost of launching a kernel."""
    all_to_all: Mapping[_Ranks, _Curve] = field(default_factory=dict[int, Curve])
    """Measured, by ranks and bytes that a rank sends to each other rank: all bytes that it sends ÷ seconds."""
    all_reduce: Mapping[_Ranks, _Curve] = field(default_factory=dict[int, Curve])
    """Measured for sums of dense gradients, by ranks and bytes of the tensor: these bytes ÷ seconds."""
    overheads: Mapping[str, Mapping[_Ranks, NotNegative]] = field(default_factory=dict[str, Curve])
    """Measured seconds of everything but bytes and products, by `OVERHEADS` and ranks: interpreter, autograd,
    optimizers, tiny exchanges."""
    efficiency: Mapping[_Ranks, Positive] = field(default_factory=dict[int, float])
    """Measured, by ranks: rate at which a step moves rows ÷ the rates of ``gather`` and ``scatter``; above 1 for cached
    rows."""
    mlp: Mapping[_Ranks, Mapping[_Operations, Positive]] = field(default_factory=dict[int, Curve])
    """Measured rate of each rank for dense layers (forward and backward pass, update), by concurrent ranks and
    operations of a layer's forward pass."""
    cores_per_node: Count
    """Number of usable physical cores."""
    cores_shared: bool = False
    """Whether ranks compute on the node's common cores, and not on devices of their own."""
    price_per_hour: NotNegative | None = None
    """Price of a node, in the user's currency; no built-in profile has one."""

    def where(self) -> str:
        """Return the text in front of a figure's name in messages."""
        return f"{self.name}: "

    def contradictions(self) -> Iterator[str]:
        """Yield messages about unknown keys, disks without a rate, and empty curves."""
        for name, known in (("flops", DTYPES), ("overheads", OVERHEADS)):
            for key in getattr(self, name):
                check_known(f"{self.name}: {name}", key, known, RecipeError)
        if self.disk_bytes and not self.disk_read:
            yield (
                f"{self.name}: disk_read: got 0 with disk_bytes {self.disk_bytes:,}, expected a rate above 0. Set it, "
                "or set disk_bytes to 0."
            )
        for name in ("gather", "scatter", "flops"):
            if not getattr(self, name):
                yield f"{self.name}: {name}: got no entry, expected at least 1"

    @classmethod
    def load(cls, name_or_file: str | Path) -> Self:
        """Read a built-in profile by its name, or a YAML file."""
        path = PROFILES / f"{name_or_file}.yaml"
        if str(name_or_file) not in profiles():
            path = Path(name_or_file)
            if not path.is_file():
                fix = f"{path} is not a file either; `hotbed doctor --measure FILE` writes one."
                check_known("hardware profile", str(name_or_file), profiles(), RecipeError, fix)
        return cls.from_dict(read_yaml(path), path.stem if path.parent == PROFILES else str(path))

    @classmethod
    def from_dict(cls, values: object, name: str) -> Self:
        """Build the figures from the content of a YAML file; ``name`` names the profile or file."""
        with naming(name):
            figures, sources, about = _read(values)
            optional = [f.name for f in fields(cls) if (f.default, f.default_factory) != (MISSING, MISSING)]
            if missing := [key for key in _FIGURES if key not in figures and key not in optional]:
                raise RecipeError(f"figures: expected also {', '.join(missing)}. Add them, or `extends:` a profile.")
            named = {source for entry in figures.values() for source in _sources(entry)}
            texts = tuple(f"{key}: {text}" for key, text in sources.items() if key in named)
            origins = {key: _describe_entry(entry) for key, entry in figures.items() if _sources(entry)}
            read = {key: _figure(key, entry) for key, entry in figures.items()}
        return cls(name=name, sources=texts, origins=origins, **about, **read)

    def origin_of(self, figure: str) -> str:
        """Return a figure's value and sources as in the profile, or how else it is known."""
        return self.origins.get(
            figure, "measured on the machine" if self.measured else "a given value, without a source"
        )

    def with_(self, **changes: Any) -> Self:
        """Return a copy with other figures."""
        for name in changes:
            check_known("hardware", name, [f.name for f in fields(self)], RecipeError)
        changes.setdefault("origins", {name: text for name, text in self.origins.items() if name not in changes})
        return replace(self, **changes)

    def scaled(self, figure: str, factor: float) -> Self:
        """Return a copy with a figure, or all entries of a curve, multiplied."""
        check_known("hardware to scale", figure, DIMENSIONS, RecipeError)
        value = getattr(self, figure)
        if value is None:
            raise RecipeError(f"{self.name}: {figure}: got none, expected a value to scale. Set it.")
        changed = _scale(value, factor)
        return self.with_(**{figure: round(changed) if figure in COUNTS else changed})

    def gather_rate(self, row_bytes: float) -> float:
        """Return the rate of random reads of rows of this size, in bytes/s."""
        return interpolated(self.gather, row_bytes)

    def scatter_rate(self, row_bytes: float) -> float:
        """Return the rate of random updates of rows of this size, in bytes/s."""
        return interpolated(self.scatter, row_bytes)

    def overhead(self, what: str, ranks: int) -> float:
        """Return the seconds of one of `OVERHEADS` for a number of ranks on a node; 0 if it was not measured.

        Above the measured numbers of ranks, it grows with the ranks per core.
        """
        curve = self.overheads.get(what)
        return interpolated(curve, ranks) * self._crowding(ranks, max(curve)) if curve else 0.0

    def mlp_rate(self, operations: float, ranks: int) -> float | None:
        """Return the FLOP/s of each of ``ranks`` in layers with ``operations``; None if it was not measured."""
        if not self.mlp:
            return None
        near = min(self.mlp, key=lambda n: abs(n - ranks))
        return interpolated(self.mlp[near], max(operations, 1.0)) / self._crowding(ranks, near)

    def curve_of(self, curves: Mapping[int, Curve], ranks: int, *, beyond: bool) -> Curve | None:
        """Return the curve of the nearest number of ranks ``beyond`` a node, or within one; None without any."""
        measured = [n for n in curves if (n > self.ranks_per_node) == beyond]
        return curves[min(measured, key=lambda n: abs(n - ranks))] if measured else None

    def _crowding(self, ranks: int, measured: int) -> float:
        """Return the ranks per core, relative to those in the measurement."""
        return max(ranks / max(measured, self.cores_per_node), 1.0) if self.cores_shared else 1.0


def interpolated(curve: Curve, at: float) -> float:
    """Return the value of a curve, linear in the logarithm of bytes, and constant outside its points."""
    points = sorted(curve.items())
    if at <= points[0][0]:
        return points[0][1]
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return low_rate + share * (high_rate - low_rate)
    return points[-1][1]


def hardware_here(device: torch.device) -> Hardware:
    """Return the profile of this machine's GPUs; or that of a server, with this machine's memory and cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory, free = memory_bytes(), shutil.disk_usage(tempfile.gettempdir()).free
    if device.type == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(device)
        found = next((profile for name, profile in GPUS.items() if name in properties.name), None)
        if found is None:
            raise PlanError(
                f"GPU: got {properties.name}, expected one of {', '.join(GPUS)}. Measure it with `hotbed doctor "
                f"--measure FILE` and set parallel.hardware to FILE, or to one of {', '.join(profiles())}."
            )
        # Rates of host memory and disks are the profile's; their sizes are those of this machine.
        profile = Hardware.load(found).with_(device_bytes=properties.total_memory, disk_bytes=free)
    else:
        profile, cores = Hardware.load(CPU), usable_cores()
        share = min(cores / profile.cores_per_node, 1.0)
        for figure in ("gather", "scatter", "flops"):
            profile = profile.scaled(figure, share)
        disk = free if profile.disk_read else 0
        profile = profile.with_(device_bytes=memory, cores_per_node=cores, disk_bytes=disk)
    network = profile.network * profile.ranks_per_node / ranks  # ranks share the node's network cards
    return profile.with_(ranks_per_node=ranks, network=network, host_bytes=memory)


# -- profiles ----------------------------------------------------------------------------------------------------------


def profiles() -> list[str]:
    """Return the names of the built-in profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def _read(values: object) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Return figures, sources and other keys of a file, merged with the profile that it extends."""
    check("a profile", values, dict, RecipeError, f"It may have {', '.join(_TOP)}.")
    found = cast("dict[str, Any]", values)
    for key, value in found.items():
        check_known("key", key, _TOP, RecipeError)
        check(key, value, _TOP[key], RecipeError)
    figures: dict[str, Any] = {}
    sources: dict[str, str] = {}
    about: dict[str, Any] = {}
    if (extends := found.get("extends")) is not None:
        check_known("extends", extends, profiles(), RecipeError)
        figures, sources, about = _read(_profile(extends))
    sources |= {str(key): str(text) for key, text in found.get("sources", {}).items()}
    changed: dict[str, Any] = found.get("figures", {})
    for key, entry in changed.items():
        check_known("figures", key, _FIGURES, RecipeError)
        for source in _sources(entry):
            check_known(f"figures.{key}.source", source, sources, RecipeError, "Explain each source in `sources`.")
    return figures | changed, sources, about | {k: found[k] for k in ("description", "measured") if k in found}


@cache
def _profile(name: str) -> Any:
    return read_yaml(PROFILES / f"{name}.yaml")


def _sources(entry: Any) -> list[Any]:
    """Return the names of a figure's sources."""
    named = entry.get("source", []) if isinstance(entry, dict) else []
    return named if isinstance(named, list) else [named]


def _describe_entry(entry: Any) -> str:
    about = cast("dict[str, Any]", entry)
    values = [_describe_value(about[key]) for key in ("value", "peak", "share") if key in about]
    return f"{' × '.join(values)} ({', '.join(map(str, _sources(entry)))})"


def _describe_value(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return "; ".join(f"{key}: {_describe_value(v)}" for key, v in cast("Mapping[Any, Any]", value).items())


def _figure(key: str, entry: Any) -> Any:
    """Read a plain figure, or an entry with its source."""
    where = f"figures.{key}"
    about = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {"value": entry}
    if not about.keys() & _ENTRY and about:  # a plain curve
        about = {"value": about}
    for name in about:
        check_known(where, name, _ENTRY, RecipeError)
    reached = "peak" in about and key not in _BY_RANKS
    if ("value" in about) == reached or ("peak" in about) != ("share" in about):
        raise RecipeError(
            f"{where}: got {', '.join(about) or 'nothing'}, expected `value`, or `peak` and the reached `share`"
        )
    if key == "cores_shared":
        return about.get("value")
    if "value" in about:
        value = _numbers(where, about["value"], DIMENSIONS[key])
        return round(value) if key in COUNTS and isinstance(value, float) and value.is_integer() else value
    peaks, shares = (
        _numbers(f"{where}.peak", about["peak"], DIMENSIONS[key]),
        _numbers(f"{where}.share", about["share"], "number"),
    )
    for one in shares.values() if isinstance(shares, dict) else (shares,):
        check(f"{where}.share", one, _Share, RecipeError)
    if not isinstance(peaks, dict):
        return _scale(shares, peaks)
    if not isinstance(shares, dict):
        return _scale(peaks, shares)
    if differing := sorted(map(str, peaks.keys() ^ shares.keys())):
        raise RecipeError(f"{where}: got {differing[0]} in only one of `peak` and `share`, expected it in both")
    return {at: peaks[at] * shares[at] for at in peaks}


def _numbers(where: str, value: Any, dimension: Dimension) -> Any:
    """Read a number, a curve, or curves; `Hardware` checks the structure."""
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        return {key: _numbers(f"{where}.{key}", entry, dimension) for key, entry in entries.items()}
    return None if value is None else parse_quantity(where, value, dimension)


def _scale(value: Any, factor: float) -> Any:
    """Multiply a number, or all entries of a curve or curves."""
    if isinstance(value, Mapping):
        return {key: _scale(v, factor) for key, v in cast("Mapping[Any, Any]", value).items()}
    return value * factor


# -- quantities --------------------------------------------------------------------------------------------------------

_PREFIXES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {f"{prefix}B": scale for prefix, scale in (_PREFIXES | _BINARY).items()}
UNITS: Mapping[Dimension, Mapping[str, float]] = {
    "bytes": _BYTES,
    "bytes/s": {f"{unit}/s": scale for unit, scale in _BYTES.items()}
    | {f"{prefix}bit/s": scale / 8 for prefix, scale in _PREFIXES.items()},
    "FLOP/s": {f"{prefix}FLOP/s": scale for prefix, scale in _PREFIXES.items()},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "number": {},
}
"""Factors of units by dimension."""
_EXAMPLES: Mapping[Dimension, str] = {
    "bytes": "80 GB or 64 GiB",
    "bytes/s": "1.3 TB/s or 200 Gbit/s",
    "FLOP/s": "19.5 TFLOP/s",
    "s": "5 us",
    "number": "8",
}
_QUANTITY = re.compile(r"([+-]?[\d.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)")


def parse_quantity(
    what: str, text: object, dimension: Dimension, error: type[HotbedError] = RecipeError, fix: str = ""
) -> float:
    """Read a number with an optional unit; the error names it by ``what`` and ends with a ``fix``."""
    number = isinstance(text, int | float | str) and not isinstance(text, bool)
    match = _QUANTITY.fullmatch(str(text).strip()) if number else None
    scale = {"": 1.0, **UNITS[dimension]}.get(match[2]) if match else None
    value = math.nan
    with suppress(ValueError):  # e.g. 1.2.3
        value = float(match[1]) * scale if match and scale is not None else math.nan
    if not math.isfinite(value):
        kind = "a number" if dimension == "number" else f"a number of {dimension}, or one with a unit"
        raise error(f"{what}: got {text!r}, expected {kind}, e.g. {_EXAMPLES[dimension]}{fix}")
    return value


def format_quantity(value: float, dimension: Dimension) -> str:
    """Format a quantity with four digits, in the largest decimal unit below it."""
    units = {u: s for u, s in UNITS[dimension].items() if "i" not in u and u[:1] != "K"}
    fitting = [(scale, unit) for unit, scale in units.items() if scale <= abs(value)]
    scale, unit = max(fitting, default=min(((s, u) for u, s in units.items()), default=(1.0, "")))
    return f"{value / scale:.4g} {unit}".strip()

"""Describe machines in numbers: memories, links, arithmetic and fixed costs.

A machine is *nodes* of equal ranks. A rank has a device with memory of its own, or, where ``cores_shared``, the ranks
of a node share its cores and memory: then the device's figures are those of the whole node.

Figures come from profiles, built-in ones or a user's own, as ``hotbed doctor --measure FILE`` writes them: YAML in
which every figure has a unit and a source. Rates are what is reached, not what is sold::

    description: 8 × A100-40, 200 Gbit/s per GPU
    sources:
      gpu: NVIDIA A100 datasheet, https://…
      neo: Mudigere et al. 2021, arXiv 2104.05158, appendix A
    extends: a100-40                     # figures that this file does not have are those of a built-in profile
    figures:
      device_bytes: {value: 40 GB, source: gpu}
      stream: {peak: 1555 GB/s, share: 0.84, source: [gpu, neo]}       # the rate that is sold, and the share reached
      gather: {peak: 1555 GB/s, share: {128: 0.6, 512: 0.8}, source: neo}     # by bytes of a row
      host_link: 25 GB/s                 # in a user's own file a figure may be plain
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self, cast

from hotbed.checks import Count, NotNegative, Positive, Range, Section, Size, check, check_known, naming
from hotbed.errors import RecipeError
from hotbed.files import read_yaml
from hotbed.plan.quantities import Dimension, parse

PROFILES = Path(__file__).parent / "profiles"
"""Where built-in profiles are."""

DIMENSIONS: Mapping[str, Dimension] = {
    "ranks_per_node": "number",
    "cores_per_node": "number",
    "device_bytes": "bytes",
    "host_bytes": "bytes",
    "disk_bytes": "bytes",
    "stream": "bytes/s",
    "gather": "bytes/s",
    "scatter": "bytes/s",
    "flops": "FLOP/s",
    "host_stream": "bytes/s",
    "host_link": "bytes/s",
    "disk_read": "bytes/s",
    "disk_latency": "s",
    "node_link": "bytes/s",
    "network": "bytes/s",
    "network_efficiency": "number",
    "oversubscription": "number",
    "message_s": "s",
    "launch_s": "s",
    "all_to_all": "bytes/s",
    "all_reduce": "bytes/s",
    "overheads": "s",
    "efficiency": "number",
    "mlp": "FLOP/s",
    "price_per_hour": "number",
}
"""What each figure measures."""
COUNTS = ("ranks_per_node", "cores_per_node", "device_bytes", "host_bytes", "disk_bytes")
"""Figures that are whole numbers."""
_FIGURES = (*DIMENSIONS, "cores_shared")
_BY_RANKS = ("all_to_all", "all_reduce", "mlp")
_TOP: dict[str, Any] = {"description": str, "sources": dict, "measured": bool, "figures": dict, "extends": str}
_ENTRY = ("value", "peak", "share", "source", "spread")

DTYPES = ("fp32", "tf32", "bf16", "fp16")
"""What matrix products are computed in."""
OVERHEADS = (
    *("step", "arena", "table", "layer", "copies", "sums", "average", "host", "disk"),  # of a step
    *("id", "host_row", "disk_row"),  # of an id, and of a row that is not in the device's memory
    "average_row",  # of a row that two replicas average, beside its bytes
    *("bf16", "fp16", "fp8", "int8"),  # of a value that a codec encodes and decodes
)
"""What `Hardware.overheads` has seconds of; `hotbed.measure.step_overheads` says how each is measured."""

Curve = Mapping[int, float]
"""Rates by bytes: of a row, or of a message."""
_Ranks = Annotated[int, Range(least=1, name="a number of ranks")]
_Bytes = Annotated[int, Range(least=1, name="a number of bytes")]
_Operations = Annotated[int, Range(least=1, name="a number of operations")]
_Curve = Mapping[_Bytes, Positive]


@dataclass(frozen=True, kw_only=True)
class Hardware(Section, error=RecipeError):
    """Figures of a machine; rates are what is reached, not what is sold.

    Units are those of the International System: bytes, bytes/s, FLOP/s, seconds.
    """

    name: str
    """Of a built-in profile, or of the file."""
    description: str = ""
    sources: tuple[str, ...] = ()
    """Where figures are from."""
    said: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """By figure, what its profile says it is, and the names of its sources; of changed ones nothing."""
    measured: bool = False
    """Whether it was measured on the machine itself."""
    ranks_per_node: Count
    """Ranks that share a host: GPUs, or processes on its cores."""
    device_bytes: Count
    """Memory of a rank's device; where ``cores_shared``, the memory that all ranks of a node share."""
    host_bytes: Count
    """Host memory of a node."""
    disk_bytes: Size = 0
    """Local disks of a node; 0: it has none."""
    stream: Positive
    """Of device memory, bytes read and written in order."""
    gather: _Curve
    """Of a lookup of rows at random, by bytes of a row: bytes of rows read and of vectors written ÷ seconds."""
    scatter: _Curve
    """Of an update of rows at random, by bytes of a row: bytes of gradients read, and of rows and moments read and
    written ÷ seconds; grouping included, unless ``overheads`` has it as ``id``."""
    flops: Mapping[str, Positive]
    """Of large matrix products, by dtype: fp32, tf32, bf16, fp16."""
    host_stream: Positive
    """Of a node's host memory, bytes read and written in order."""
    host_link: Positive
    """Between a rank's device and the host's memory, in one direction."""
    disk_read: NotNegative = 0.0
    """Random reads of 4 KiB from a node's disks, many at a time; 0 where there are none."""
    disk_latency: NotNegative = 0.0
    """Of one random read of 4 KiB."""
    node_link: Positive
    """What a rank sends to others of its node, in one direction."""
    network: Positive
    """What a rank's share of the node's network cards carries in one direction, by their specification."""
    network_efficiency: Annotated[float, Range(above=0, most=1)] = 1.0
    """Share of ``network`` that collectives reach."""
    oversubscription: Annotated[float, Range(least=1)] = 1.0
    """Bandwidth of nodes into the network ÷ that of the network between them; 1: it does not block."""
    message_s: NotNegative
    """Fixed cost of a message to one other rank."""
    launch_s: NotNegative
    """Fixed cost of launching a kernel."""
    all_to_all: Mapping[_Ranks, _Curve] = field(default_factory=dict[int, Curve])
    """Measured, by ranks, then by bytes that a rank sends to each other one: bytes that it sends in all ÷ seconds."""
    all_reduce: Mapping[_Ranks, _Curve] = field(default_factory=dict[int, Curve])
    """Measured, of dense gradients in rank order, by ranks, then by bytes of the tensor: these bytes ÷ seconds."""
    overheads: Mapping[str, Mapping[_Ranks, NotNegative]] = field(default_factory=dict[str, Curve])
    """Measured seconds of what is neither bytes nor products, by `OVERHEADS` and number of ranks: interpreter,
    autograd, optimizers, exchanges of next to nothing."""
    efficiency: Mapping[_Ranks, Positive] = field(default_factory=dict[int, float])
    """Measured, by number of ranks: rate at which a step moves rows ÷ what ``gather`` and ``scatter`` say; above 1
    where rows are still in a cache."""
    mlp: Mapping[_Ranks, Mapping[_Operations, Positive]] = field(default_factory=dict[int, Curve])
    """Measured, of what each rank computes of dense layers (forward and backward pass, update), by ranks that do so at
    once, then by operations of a layer's forward pass."""
    cores_per_node: Count
    """Physical cores, or those that may be used."""
    cores_shared: bool = False
    """Whether ranks compute on the node's cores, which they share, rather than on devices of their own."""
    price_per_hour: NotNegative | None = None
    """Of a node, in the user's currency; no profile has one."""

    def where(self) -> str:
        """Return the text in front of a figure's name in messages."""
        return f"{self.name}: "

    def contradictions(self) -> Iterator[str]:
        """Yield a message for disks that read nothing, for unknown overheads and for curves without a point."""
        for dtype in self.flops:
            check_known(f"{self.name}: flops", dtype, DTYPES, RecipeError)
        for what in self.overheads:
            check_known(f"{self.name}: overheads", what, OVERHEADS, RecipeError)
        if self.disk_bytes and not self.disk_read:
            yield (
                f"{self.name}: disk_bytes is {self.disk_bytes:,}, but disk_read is 0, so that rows there would cost "
                "nothing; set disk_read, or disk_bytes to 0"
            )
        for name in ("gather", "scatter", "flops"):
            if not getattr(self, name):
                yield f"{self.name}: {name} is empty, must have at least one entry"

    @classmethod
    def load(cls, name_or_file: str | Path) -> Self:
        """Read a built-in profile by its name, or a YAML file."""
        path = PROFILES / f"{name_or_file}.yaml"
        if str(name_or_file) not in profiles():
            path = Path(name_or_file)
            if not path.is_file():
                fix = f"There is no file {path} either; `hotbed doctor --measure FILE` writes one."
                check_known("hardware profile", str(name_or_file), profiles(), RecipeError, fix)
        return cls.from_dict(read_yaml(path), path.stem if path.parent == PROFILES else str(path))

    @classmethod
    def from_dict(cls, values: object, name: str) -> Self:
        """Make it of what a YAML file holds; ``name`` is that of the profile or file."""
        with naming(name):
            figures, sources, about = _read(values)
            optional = [f.name for f in fields(cls) if (f.default, f.default_factory) != (MISSING, MISSING)]
            if missing := [key for key in _FIGURES if key not in figures and key not in optional]:
                raise RecipeError(f"figures lacks {', '.join(missing)}; add them, or `extends:` a built-in profile")
            named = {source for entry in figures.values() for source in _sources(entry)}
            texts = tuple(f"{key}: {text}" for key, text in sources.items() if key in named)
            said = {key: text for key, entry in figures.items() if (text := _said(entry))}
            read = {key: _figure(key, entry) for key, entry in figures.items()}
        return cls(name=name, sources=texts, said=said, **about, **read)

    def said_of(self, figure: str) -> str:
        """Say what a figure is, with the names of its sources: as the profile does, or what is known of it else."""
        other = "measured on the machine" if self.measured else "as given, without a source"
        return self.said.get(figure, other)

    def with_(self, **changes: Any) -> Self:
        """Copy it with other figures, in units of the International System."""
        for name in changes:
            check_known("hardware", name, [f.name for f in fields(self)], RecipeError)
        changes.setdefault("said", {name: text for name, text in self.said.items() if name not in changes})
        return replace(self, **changes)

    def scaled(self, figure: str, factor: float) -> Self:
        """Copy it with a figure, or all entries of a curve, multiplied: how elasticities are found."""
        check_known("hardware to scale", figure, DIMENSIONS, RecipeError)
        value = getattr(self, figure)
        if value is None:
            raise RecipeError(f"{self.name}: {figure} is not set, so it cannot be scaled; set it first")
        changed = _scaled(value, factor)
        return self.with_(**{figure: round(changed) if figure in COUNTS else changed})

    def gather_rate(self, row_bytes: float) -> float:
        """Bytes/s of rows of so many bytes, read at random."""
        return interpolated(self.gather, row_bytes)

    def overhead(self, what: str, ranks: int) -> float:
        """Seconds of one of `OVERHEADS` where so many ranks train on a node; 0 where it was not measured.

        Of more ranks than were measured it is more by as much as more of them share a core.
        """
        curve = self.overheads.get(what)
        return interpolated(curve, ranks) * self._crowding(ranks, max(curve)) if curve else 0.0

    def mlp_rate(self, operations: float, ranks: int) -> float | None:
        """FLOP/s of each of so many ranks, in layers of so many operations; None where it was not measured."""
        if not self.mlp:
            return None
        near = min(self.mlp, key=lambda n: abs(n - ranks))
        return interpolated(self.mlp[near], max(operations, 1.0)) / self._crowding(ranks, near)

    def curve_of(self, curves: Mapping[int, Curve], ranks: int, *, beyond: bool) -> Curve | None:
        """Of curves by ranks that of the nearest number; None where none was measured ``beyond`` a node, or within."""
        alike = [n for n in curves if (n > self.ranks_per_node) == beyond]
        return curves[min(alike, key=lambda n: abs(n - ranks))] if alike else None

    def _crowding(self, ranks: int, measured: int) -> float:
        """How many times more ranks share a core than when so many were measured."""
        if not self.cores_shared:
            return 1.0
        return max(ranks / max(measured, self.cores_per_node), 1.0)

    def scatter_rate(self, row_bytes: float) -> float:
        """Bytes/s of rows of so many bytes, read and written at random."""
        return interpolated(self.scatter, row_bytes)


def interpolated(curve: Curve, at: float) -> float:
    """Read a curve between its points, linearly in the logarithm of bytes; outside it is what it is at the nearest."""
    points = sorted(curve.items())
    if at <= points[0][0]:
        return points[0][1]
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return low_rate + share * (high_rate - low_rate)
    return points[-1][1]


# -- profiles ----------------------------------------------------------------------------------------------------------


def profiles() -> list[str]:
    """List names of the built-in profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def _read(values: object) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Split a file into its figures, its sources, and its other keys, with those of the profile that it extends."""
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
    """List what a figure's sources are called; a plain one has none."""
    named = entry.get("source", []) if isinstance(entry, dict) else []
    return named if isinstance(named, list) else [named]


def _said(entry: Any) -> str:
    """Say what a figure is and where it is from, as its entry has it; nothing of a plain one."""
    names = _sources(entry)
    if not names:
        return ""
    about = cast("dict[str, Any]", entry)
    what = [_joined(about[word]) for word in ("value", "peak", "share") if word in about]
    return f"{' × '.join(what)} ({', '.join(map(str, names))})"


def _joined(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return "; ".join(f"{key}: {_joined(v)}" for key, v in cast("Mapping[Any, Any]", value).items())


def _figure(key: str, entry: Any) -> Any:
    """Read a figure: plain, or a mapping with its source."""
    where = f"figures.{key}"
    about = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {"value": entry}
    if not about.keys() & _ENTRY and about:  # a plain curve
        about = {"value": about}
    for name in about:
        check_known(where, name, _ENTRY, RecipeError)
    reached = "peak" in about and key not in _BY_RANKS
    if ("value" in about) == reached or ("peak" in about) != ("share" in about):
        raise RecipeError(f"{where} must have either `value`, or `peak` and the `share` of it that is reached")
    if key == "cores_shared":
        return about.get("value")
    if "value" in about:
        value = _numbers(where, about["value"], DIMENSIONS[key])
    else:
        value = _reached(where, about["peak"], about["share"], DIMENSIONS[key])
    return round(value) if key in COUNTS and isinstance(value, float) and value.is_integer() else value


def _numbers(where: str, value: Any, dimension: Dimension) -> Any:
    """Read a number, or those of a curve or curves; `Hardware` checks which of these a figure is."""
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        return {key: _numbers(f"{where}.{key}", entry, dimension) for key, entry in entries.items()}
    return None if value is None else parse(where, value, dimension)


def _reached(where: str, peak: Any, share: Any, dimension: Dimension) -> Any:
    """Multiply the rate that is sold by the share of it that is reached; both may be curves."""

    def read(name: str, value: Any, dimension: Dimension) -> Any:
        entries = cast("dict[Any, Any]", value) if isinstance(value, dict) else {None: value}
        found = {key: parse(f"{where}.{name}", entry, dimension) for key, entry in entries.items()}
        return found if isinstance(value, dict) else found[None]

    peaks, shares = read("peak", peak, dimension), read("share", share, "number")
    for one in shares.values() if isinstance(shares, dict) else (shares,):
        check(f"{where}.share", one, Annotated[float, Range(above=0, most=1)], RecipeError)
    if not isinstance(peaks, dict):
        return _scaled(shares, peaks)
    if not isinstance(shares, dict):
        return _scaled(peaks, shares)
    if differing := sorted(map(str, peaks.keys() ^ shares.keys())):
        raise RecipeError(f"{where} has {differing[0]} in only one of `peak` and `share`")
    return {at: peaks[at] * shares[at] for at in peaks}


def _scaled(value: Any, factor: float) -> Any:
    """Multiply a number, or all of a curve or curves."""
    if isinstance(value, Mapping):
        return {key: _scaled(v, factor) for key, v in cast("Mapping[Any, Any]", value).items()}
    return value * factor

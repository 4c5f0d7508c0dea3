"""Describe machines in numbers: memories, links, arithmetic and fixed costs, from profiles that name their sources.

Profiles are YAML files: those in ``profiles/``, whose names `Hardware.load` knows, and a user's own, as ``hotbed doctor
--measure FILE`` writes them. Every figure says where it is from::

    description: 8 × A100-40, 200 Gbit/s per GPU
    sources:
      gpu: NVIDIA A100 datasheet, https://…
      neo: Mudigere et al. 2021, arXiv 2104.05158, appendix A
    figures:
      device_bytes: {value: 40 GB, source: gpu}
      stream: {peak: 1555 GB/s, share: 0.84, source: [gpu, neo]}       # what is sold, and which share of it is reached
      gather: {peak: 1555 GB/s, share: {128: 0.6, 512: 0.8}, source: neo}     # by bytes of a row
    extends: a100-40                                                   # what is not said here is that profile's

A machine is *nodes* of equal ranks. A rank has a device with memory of its own, or, where ``cores_shared``, the ranks
of a node share its cores and memory: then the device's figures are those of the whole node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, cast

from hotbed.errors import RecipeError, did_you_mean
from hotbed.files import read_yaml
from hotbed.plan.quantities import Dimension, parse

PROFILES = Path(__file__).parent / "profiles"
"""Where built-in profiles are."""

DTYPES = ("fp32", "tf32", "bf16", "fp16")
"""What matrix products are computed in."""

Curve = Mapping[int, float]
"""Rates by bytes: of a row, or of a message."""


_DIMENSIONS: Mapping[str, Dimension] = {
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
    "price_per_hour": "number",
}
"""What each figure measures."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Figures of a machine; rates are what is reached, not what is sold.

    Units are those of the International System: bytes, bytes/s, FLOP/s, seconds.
    """

    name: str
    """Of a built-in profile, or of the file."""
    description: str = ""
    sources: tuple[str, ...] = ()
    """Where figures are from."""
    measured: bool = False
    """Whether it was measured on the machine itself."""
    ranks_per_node: int
    """Ranks that share a host: GPUs, or processes on its cores."""
    device_bytes: int
    """Memory of a rank's device; where ``cores_shared``, the memory that all ranks of a node share."""
    host_bytes: int
    """Host memory of a node."""
    disk_bytes: int = 0
    """Local disks of a node; 0: it has none."""
    stream: float
    """Of device memory, bytes read and written in order."""
    gather: Curve
    """A lookup's, of rows at random, by bytes of a row: bytes of distinct rows read and of vectors written ÷ seconds."""
    scatter: Curve
    """An update's, grouping included, by bytes of a row: bytes of gradients read, of rows and moments read and written ÷
    seconds."""
    flops: Mapping[str, float]
    """Of large matrix products, by dtype: fp32, tf32, bf16, fp16."""
    host_stream: float
    """Of a node's host memory."""
    host_link: float
    """Between a rank's device and the host's memory, in one direction."""
    disk_read: float = 0.0
    """Random reads from a node's disks, many at a time; 0 where there are none."""
    disk_latency: float = 0.0
    """Of one random read."""
    node_link: float
    """What a rank sends to others of its node, in one direction."""
    network: float
    """What a rank's share of the node's network cards carries in one direction, by their specification."""
    network_efficiency: float = 1.0
    """Share of ``network`` that collectives reach."""
    oversubscription: float = 1.0
    """Bandwidth of nodes into the network ÷ that of the network between them; 1: it does not block."""
    message_s: float
    """Fixed cost of a message to one other rank."""
    launch_s: float
    """Fixed cost of launching a kernel."""
    all_to_all: Mapping[int, Curve] = field(default_factory=dict[int, Curve])
    """Measured, by ranks, then by bytes that a rank sends to each other one: bytes that it sends in all ÷ seconds."""
    all_reduce: Mapping[int, Curve] = field(default_factory=dict[int, Curve])
    """Measured, by ranks, then by bytes of the tensor that is summed: these bytes ÷ seconds."""
    cores_per_node: int
    """Physical cores, or those that may be used."""
    cores_shared: bool = False
    """Whether ranks compute on the node's cores, which they share, rather than on devices of their own."""
    price_per_hour: float | None = None
    """Of a node, in the user's currency; no profile has one."""

    def __post_init__(self) -> None:
        for name, dimension in _DIMENSIONS.items():
            least = _LEAST.get(name, 0.0)
            for key, value in _leaves(getattr(self, name)):
                where = f"{name}[{key}]" if key else name
                if not math.isfinite(value) or value < least or (value == 0 and name not in _MAY_BE_ZERO):
                    limit = f"at least {least:g}" if least else "not negative" if name in _MAY_BE_ZERO else "above 0"
                    raise RecipeError(f"{self.name}: {where} is {value:g} {_unit(dimension)}, must be {limit}")
                if name in _COUNTS and value != int(value):
                    raise RecipeError(f"{self.name}: {where} is {value:g}, must be a whole number")
        if self.network_efficiency > 1:
            raise RecipeError(f"{self.name}: network_efficiency is {self.network_efficiency:g}, must be at most 1")
        for name in ("gather", "scatter", "flops"):
            if not getattr(self, name):
                raise RecipeError(f"{self.name}: {name} is empty, must have at least one entry")
        if unknown := [d for d in self.flops if d not in DTYPES]:
            raise RecipeError(
                f"{self.name}: flops has '{unknown[0]}', must be of {', '.join(DTYPES)}"
                f"{did_you_mean(unknown[0], DTYPES)}"
            )

    @classmethod
    def load(cls, name_or_file: str | Path) -> Self:
        """Read a built-in profile by its name, or a YAML file.

        Raises
        ------
        RecipeError
            If there is neither, or the file says what cannot be; the message names file, key, value and limit.
        """
        path = PROFILES / f"{name_or_file}.yaml"
        if str(name_or_file) not in profiles():
            path = Path(name_or_file)
            if not path.is_file():
                raise RecipeError(
                    f"there is no hardware profile '{name_or_file}', and no such file; give a YAML file as `hotbed "
                    f"doctor --measure FILE` writes it, or one of {', '.join(profiles())}"
                    f"{did_you_mean(str(name_or_file), profiles())}"
                )
        return cls.from_dict(read_yaml(path), path.stem if path.parent == PROFILES else str(path))

    @classmethod
    def from_dict(cls, values: object, name: str) -> Self:
        """Make it of what a YAML file holds; ``name`` is that of the profile or file.

        Raises
        ------
        RecipeError
            If that cannot be.
        """
        try:
            figures, sources, about = _read(values)
            for key in figures:
                if key not in _FIGURES:
                    raise ValueError(f"figures has the unknown key '{key}'{did_you_mean(key, _FIGURES)}")
            if missing := [key for key in _REQUIRED if key not in figures]:
                raise ValueError(f"figures lacks {', '.join(missing)}; add them, or `extends:` a built-in profile")
            read: dict[str, Any] = {key: _figure(key, entry) for key, entry in figures.items()}
        except ValueError as error:
            raise RecipeError(f"{name}: {error}") from None
        return cls(name=name, sources=tuple(f"{key}: {text}" for key, text in sources.items()), **about, **read)

    def with_(self, **changes: Any) -> Self:
        """Copy it with other figures, in units of the International System.

        Raises
        ------
        RecipeError
            If there is no such figure, or it cannot be.
        """
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise RecipeError(f"hardware has no figure '{name}'{did_you_mean(name, known)}")
        return replace(self, **changes)

    def scaled(self, figure: str, factor: float) -> Self:
        """Copy it with a figure, or all entries of a curve, multiplied: how elasticities are found.

        Raises
        ------
        RecipeError
            If there is no such figure, or it cannot be.
        """
        if figure not in _DIMENSIONS:
            raise RecipeError(f"hardware has no figure '{figure}' to scale{did_you_mean(figure, _DIMENSIONS)}")
        value = getattr(self, figure)
        if value is None:
            raise RecipeError(f"{self.name}: {figure} is not set, so it cannot be scaled; set it first")
        scaled = _scaled(value, factor)
        return replace(self, **{figure: round(scaled) if figure in _COUNTS else scaled})

    def gather_rate(self, row_bytes: float) -> float:
        """Bytes/s of rows of so many bytes, read at random."""
        return interpolated(self.gather, row_bytes)

    def scatter_rate(self, row_bytes: float) -> float:
        """Bytes/s of rows of so many bytes, read and written at random."""
        return interpolated(self.scatter, row_bytes)


def profiles() -> list[str]:
    """Names of the built-in profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def interpolated(curve: Curve, at: float) -> float:
    """Read a curve between its points, linearly in the logarithm of bytes; outside it is what it is at the nearest.

    Parameters
    ----------
    curve
        Bytes and rates; not empty.
    at
        Bytes.
    """
    points = sorted(curve.items())
    if at <= points[0][0]:
        return points[0][1]
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return low_rate + share * (high_rate - low_rate)
    return points[-1][1]


# -- reading -------------------------------------------------------------------------------------------------------

_FIGURES = [*_DIMENSIONS, "cores_shared"]
_REQUIRED = [
    f.name for f in fields(Hardware) if f.name in _DIMENSIONS and f.default is MISSING and f.default_factory is MISSING
]
_COUNTS = ("ranks_per_node", "cores_per_node", "device_bytes", "host_bytes", "disk_bytes")
_LEAST = {"ranks_per_node": 1.0, "cores_per_node": 1.0, "oversubscription": 1.0}
_MAY_BE_ZERO = ("disk_bytes", "disk_read", "disk_latency", "message_s", "launch_s", "price_per_hour")
_BY_BYTES = ("gather", "scatter")
_BY_RANKS = ("all_to_all", "all_reduce")
_TOP = {"description": str, "sources": dict, "measured": bool, "figures": dict, "extends": str}
_ENTRY = ("value", "peak", "share", "source", "spread")


def _read(values: object) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Split a file into its figures, its sources, and what else it says, with those of what it extends."""
    if not isinstance(values, dict):
        raise ValueError(f"is {type(values).__name__}, must be a mapping with {', '.join(_TOP)}")
    found = cast("dict[str, Any]", values)
    for key, value in found.items():
        if key not in _TOP:
            raise ValueError(f"has the unknown key '{key}'{did_you_mean(str(key), _TOP)}")
        if not isinstance(value, _TOP[key]):
            raise ValueError(f"{key} is {value!r}, must be a {_TOP[key].__name__}")
    figures: dict[str, Any] = {}
    sources: dict[str, str] = {}
    about: dict[str, Any] = {}
    if (extends := found.get("extends")) is not None:
        if extends not in profiles():
            raise ValueError(
                f"extends is '{extends}', must be one of {', '.join(profiles())}{did_you_mean(extends, profiles())}"
            )
        figures, sources, about = _read(_profile(extends))
    own: dict[str, str] = {str(key): str(text) for key, text in found.get("sources", {}).items()}
    changed: dict[str, Any] = found.get("figures", {})
    _check_sources(changed, sources | own)
    about = about | {key: found[key] for key in ("description", "measured") if key in found}
    return figures | changed, sources | own, about


@cache
def _profile(name: str) -> Any:
    return read_yaml(PROFILES / f"{name}.yaml")


def _check_sources(figures: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    for key, entry in figures.items():
        named = entry.get("source", []) if isinstance(entry, dict) else []
        for source in cast("Sequence[object]", named if isinstance(named, list) else [named]):
            if source not in sources:
                raise ValueError(
                    f"figures.{key}.source is {source!r}, which `sources` does not explain"
                    f"{did_you_mean(str(source), sources)}"
                )


def _figure(key: str, entry: Any) -> Any:
    """Read a figure: plain, or a mapping with its source."""
    about = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {"value": entry}
    if not about.keys() & _ENTRY and about:  # a plain curve
        about = {"value": about}
    if unknown := [k for k in about if k not in _ENTRY]:
        raise ValueError(f"figures.{key} has the unknown key '{unknown[0]}'{did_you_mean(str(unknown[0]), _ENTRY)}")
    if ("value" in about) == ("peak" in about) or ("peak" in about) != ("share" in about):
        raise ValueError(f"figures.{key} must have either `value`, or `peak` and the `share` of it that is reached")
    where = f"figures.{key}"
    if key == "cores_shared":
        if not isinstance(about.get("value"), bool):
            raise ValueError(f"{where} is {about.get('value')!r}, must be true or false")
        return about["value"]
    dimension = _DIMENSIONS[key]
    if "value" in about:
        value = _quantities(where, key, about["value"], dimension)
    else:
        value = _reached(where, key, about["peak"], about["share"])
    return round(value) if key in _COUNTS and value == round(value) else value


def _quantities(where: str, key: str, value: Any, dimension: Dimension) -> Any:
    """Read a number, or the curve or curves that this figure is."""
    if key == "price_per_hour" and value is None:
        return None
    if key not in (*_BY_BYTES, *_BY_RANKS, "flops"):
        return _quantity(where, value, dimension)
    if not isinstance(value, dict):
        by = {"flops": "dtype", "gather": "bytes of a row", "scatter": "bytes of a row"}.get(key, "number of ranks")
        raise ValueError(f"{where} is {value!r}, must be a mapping by {by}")
    entries = cast("dict[Any, Any]", value)
    if key == "flops":
        return {str(dtype): _quantity(f"{where}.{dtype}", v, dimension) for dtype, v in entries.items()}
    for at in entries:
        if isinstance(at, bool) or not isinstance(at, int) or at < 1:
            raise ValueError(f"{where} has the key {at!r}, must be a whole number of at least 1")
    if key in _BY_RANKS:
        return {at: _quantities(f"{where}.{at}", "gather", curve, dimension) for at, curve in entries.items()}
    return {at: _quantity(f"{where}.{at}", v, dimension) for at, v in entries.items()}


def _reached(where: str, key: str, peak: Any, share: Any) -> Any:
    """Multiply what is sold by the share of it that is reached; either may be by bytes of a row, or by dtype."""

    def read(name: str, value: Any, dimension: Dimension) -> Any:
        if isinstance(value, dict):
            return _quantities(f"{where}.{name}", key, value, dimension)
        return _quantity(f"{where}.{name}", value, dimension)

    peaks, shares = read("peak", peak, _DIMENSIONS[key]), read("share", share, "number")
    if too_large := [share for _, share in _leaves(shares) if not 0 < share <= 1]:
        raise ValueError(f"{where}.share is {too_large[0]:g}, must be above 0 and at most 1")
    if not isinstance(peaks, dict):
        return _scaled(shares, peaks)
    if not isinstance(shares, dict):
        return _scaled(peaks, shares)
    if differing := sorted(map(str, peaks.keys() ^ shares.keys())):
        raise ValueError(f"{where} has {differing[0]} in only one of `peak` and `share`")
    return {at: peaks[at] * shares[at] for at in peaks}


def _quantity(where: str, value: object, dimension: Dimension) -> float:
    try:
        return parse(value, dimension)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


def _leaves(value: Any, key: str = "") -> list[tuple[str, float]]:
    """The numbers of a figure, with where they are in it."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return [leaf for k, v in entries.items() for leaf in _leaves(v, f"{key}, {k}" if key else f"{k}")]
    return [] if value is None else [(key, float(value))]


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, Mapping):
        return {key: _scaled(v, factor) for key, v in cast("Mapping[Any, Any]", value).items()}
    return value * factor


def _unit(dimension: Dimension) -> str:
    return "" if dimension == "number" else dimension

"""Read hardware profiles: YAML in which every figure has a unit and a source.

A profile looks like this::

    description: 8 × A100-40, 200 Gbit/s per GPU
    sources:
      gpu: NVIDIA A100 datasheet, https://…
      neo: Mudigere et al. 2021, arXiv 2104.05158, appendix A
    extends: a100-40                     # what is not said here is that built-in profile's
    figures:
      device_bytes: {value: 40 GB, source: gpu}
      stream: {peak: 1555 GB/s, share: 0.84, source: [gpu, neo]}       # what is sold, and which share of it is reached
      gather: {peak: 1555 GB/s, share: {128: 0.6, 512: 0.8}, source: neo}     # by bytes of a row
      host_link: 25 GB/s                 # in a user's own file a figure may be plain

What the figures mean is said in `hotbed.plan.hardware`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from hotbed.errors import did_you_mean
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
_OPTIONAL = (
    "disk_bytes",
    "disk_read",
    "disk_latency",
    "network_efficiency",
    "oversubscription",
    "all_to_all",
    "all_reduce",
    "overheads",
    "efficiency",
    "mlp",
    "cores_shared",
    "price_per_hour",
)
_FIGURES = (*DIMENSIONS, "cores_shared")
_BY_NUMBER = {
    "gather": "bytes of a row",
    "scatter": "bytes of a row",
    "efficiency": "number of ranks",
}
_BY_RANKS = ("all_to_all", "all_reduce", "mlp")
_BY_NAME = {"flops": "dtype", "overheads": "what they are of"}
_TOP = {
    "description": (str, "text"),
    "sources": (dict, "a mapping of names to texts"),
    "measured": (bool, "true or false"),
    "figures": (dict, "a mapping"),
    "extends": (str, "a built-in profile's name"),
}
_ENTRY = ("value", "peak", "share", "source", "spread")


def profiles() -> list[str]:
    """List names of the built-in profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def read_profile(values: object) -> dict[str, Any]:
    """Read what a YAML file holds: figures by name, ``description``, ``sources`` and ``measured``."""
    figures, sources, about = _read(values)
    for key in figures:
        if key not in _FIGURES:
            raise ValueError(f"figures has the unknown key '{key}'{did_you_mean(str(key), _FIGURES)}")
    if missing := [key for key in _FIGURES if key not in figures and key not in _OPTIONAL]:
        raise ValueError(f"figures lacks {', '.join(missing)}; add them, or `extends:` a built-in profile")
    named = {source for entry in figures.values() for source in _sources(entry)}
    texts = tuple(f"{key}: {text}" for key, text in sources.items() if key in named)
    said = {key: text for key, entry in figures.items() if (text := _said(entry))}
    return {"sources": texts, "said": said, **about, **{key: _figure(key, entry) for key, entry in figures.items()}}


def _read(values: object) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Split a file into its figures, its sources, and what else it says, with those of what it extends."""
    if not isinstance(values, dict):
        raise ValueError(f"is {type(values).__name__}, must be a mapping with {', '.join(_TOP)}")
    found = cast("dict[str, Any]", values)
    for key, value in found.items():
        if key not in _TOP:
            raise ValueError(f"has the unknown key '{key}'{did_you_mean(str(key), _TOP)}")
        kind, words = _TOP[key]
        if not isinstance(value, kind):
            raise ValueError(f"{key} is {value!r}, must be {words}")
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
        for source in _sources(entry):
            if not isinstance(source, str) or source not in sources:
                raise ValueError(
                    f"figures.{key}.source is {source!r}, which `sources` does not explain"
                    f"{did_you_mean(str(source), sources)}"
                )


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
    about = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {"value": entry}
    if not about.keys() & _ENTRY and about:  # a plain curve
        about = {"value": about}
    if unknown := [k for k in about if k not in _ENTRY]:
        raise ValueError(f"figures.{key} has the unknown key '{unknown[0]}'{did_you_mean(str(unknown[0]), _ENTRY)}")
    reached = "peak" in about and key not in _BY_RANKS
    if ("value" in about) == reached or ("peak" in about) != ("share" in about):
        raise ValueError(f"figures.{key} must have either `value`, or `peak` and the `share` of it that is reached")
    where = f"figures.{key}"
    if key == "cores_shared":
        if not isinstance(about.get("value"), bool):
            raise ValueError(f"{where} is {about.get('value')!r}, must be true or false")
        return about["value"]
    dimension = DIMENSIONS[key]
    if "value" in about:
        value = _quantities(where, key, about["value"], dimension)
    else:
        value = _reached(where, key, about["peak"], about["share"])
    return round(value) if key in COUNTS and value == round(value) else value


def _quantities(where: str, key: str, value: Any, dimension: Dimension) -> Any:
    """Read a number, or the curve or curves that this figure is."""
    if key == "price_per_hour" and value is None:
        return None
    if key not in (*_BY_NUMBER, *_BY_RANKS, *_BY_NAME):
        return _quantity(where, value, dimension)
    if not isinstance(value, dict):
        by = (_BY_NUMBER | _BY_NAME).get(key, "number of ranks")
        raise ValueError(f"{where} is {value!r}, must be a mapping by {by}")
    entries = cast("dict[Any, Any]", value)
    if key == "flops":
        return {str(dtype): _quantity(f"{where}.{dtype}", v, dimension) for dtype, v in entries.items()}
    if key == "overheads":
        return {str(of): _quantities(f"{where}.{of}", "efficiency", v, dimension) for of, v in entries.items()}
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

    peaks, shares = read("peak", peak, DIMENSIONS[key]), read("share", share, "number")
    if too_large := [share for _, share in leaves(shares) if not 0 < share <= 1]:
        raise ValueError(f"{where}.share is {too_large[0]:g}, must be above 0 and at most 1")
    if not isinstance(peaks, dict):
        return scaled(shares, peaks)
    if not isinstance(shares, dict):
        return scaled(peaks, shares)
    if differing := sorted(map(str, peaks.keys() ^ shares.keys())):
        raise ValueError(f"{where} has {differing[0]} in only one of `peak` and `share`")
    return {at: peaks[at] * shares[at] for at in peaks}


def _quantity(where: str, value: object, dimension: Dimension) -> float:
    try:
        return parse(value, dimension)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


def leaves(value: Any, key: str = "") -> list[tuple[str, float]]:
    """List the numbers of a figure, with where they are in it."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return [leaf for k, v in entries.items() for leaf in leaves(v, f"{key}, {k}" if key else f"{k}")]
    return [] if value is None else [(key, float(value))]


def scaled(value: Any, factor: float) -> Any:
    """Multiply a number, or all of a curve or curves."""
    if isinstance(value, Mapping):
        return {key: scaled(v, factor) for key, v in cast("Mapping[Any, Any]", value).items()}
    return value * factor

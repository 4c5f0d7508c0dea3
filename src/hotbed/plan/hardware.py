"""Describe machines in numbers: memories, links, arithmetic and fixed costs.

Figures come from profiles, which name a source for each (`hotbed.plan.profile_files`): built-in ones, and a user's own,
as ``hotbed doctor --measure FILE`` writes them. Rates are what is reached, not what is sold.

A machine is *nodes* of equal ranks. A rank has a device with memory of its own, or, where ``cores_shared``, the ranks
of a node share its cores and memory: then the device's figures are those of the whole node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from hotbed.errors import RecipeError, did_you_mean
from hotbed.files import read_yaml
from hotbed.plan.profile_files import COUNTS, DIMENSIONS, PROFILES, leaves, profiles, read_profile, scaled

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

_LEAST = {"ranks_per_node": 1.0, "cores_per_node": 1.0, "oversubscription": 1.0}
_MAY_BE_ZERO = ("disk_bytes", "disk_read", "disk_latency", "message_s", "launch_s", "price_per_hour", "overheads")


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
    said: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """By figure, what its profile says it is, and the names of its sources; of changed ones nothing."""
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
    """Of a lookup of rows at random, by bytes of a row: bytes of rows read and of vectors written ÷ seconds."""
    scatter: Curve
    """Of an update of rows at random, by bytes of a row: bytes of gradients read, and of rows and moments read and
    written ÷ seconds; grouping included, unless ``overheads`` has it as ``id``."""
    flops: Mapping[str, float]
    """Of large matrix products, by dtype: fp32, tf32, bf16, fp16."""
    host_stream: float
    """Of a node's host memory, bytes read and written in order."""
    host_link: float
    """Between a rank's device and the host's memory, in one direction."""
    disk_read: float = 0.0
    """Random reads of 4 KiB from a node's disks, many at a time; 0 where there are none."""
    disk_latency: float = 0.0
    """Of one random read of 4 KiB."""
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
    """Measured, of dense gradients in rank order, by ranks, then by bytes of the tensor: these bytes ÷ seconds."""
    overheads: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    """Measured seconds of what is neither bytes nor products, by `OVERHEADS` and number of ranks: interpreter,
    autograd, optimizers, exchanges of next to nothing."""
    efficiency: Curve = field(default_factory=dict[int, float])
    """Measured, by number of ranks: rate at which a step moves rows ÷ what ``gather`` and ``scatter`` say; above 1
    where rows are still in a cache."""
    mlp: Mapping[int, Curve] = field(default_factory=dict[int, Curve])
    """Measured, of what each rank computes of dense layers (forward and backward pass, update), by ranks that do so at
    once, then by operations of a layer's forward pass."""
    cores_per_node: int
    """Physical cores, or those that may be used."""
    cores_shared: bool = False
    """Whether ranks compute on the node's cores, which they share, rather than on devices of their own."""
    price_per_hour: float | None = None
    """Of a node, in the user's currency; no profile has one."""

    def __post_init__(self) -> None:
        for name, dimension in DIMENSIONS.items():
            least = _LEAST.get(name, 0.0)
            for key, value in leaves(getattr(self, name)):
                where = f"{name}[{key}]" if key else name
                if not math.isfinite(value) or value < least or (value == 0 and name not in _MAY_BE_ZERO):
                    limit = f"at least {least:g}" if least else "not negative" if name in _MAY_BE_ZERO else "above 0"
                    unit = "" if dimension == "number" else f" {dimension}"
                    raise RecipeError(f"{self.name}: {where} is {value:g}{unit}, must be {limit}")
                if name in COUNTS and value != int(value):
                    raise RecipeError(f"{self.name}: {where} is {value:g}, must be a whole number")
        if self.disk_bytes and not self.disk_read:
            raise RecipeError(
                f"{self.name}: disk_bytes is {self.disk_bytes:,}, but disk_read is 0, so that rows there would cost "
                "nothing; set disk_read, or disk_bytes to 0"
            )
        if self.network_efficiency > 1:
            raise RecipeError(f"{self.name}: network_efficiency is {self.network_efficiency:g}, must be at most 1")
        if unknown := [what for what in self.overheads if what not in OVERHEADS]:
            raise RecipeError(
                f"{self.name}: overheads has '{unknown[0]}', must be of {', '.join(OVERHEADS)}"
                f"{did_you_mean(unknown[0], OVERHEADS)}"
            )
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
        """Read a built-in profile by its name, or a YAML file."""
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
        """Make it of what a YAML file holds; ``name`` is that of the profile or file."""
        try:
            read = read_profile(values)
        except ValueError as error:
            raise RecipeError(f"{name}: {error}") from None
        return cls(name=name, **read)

    def said_of(self, figure: str) -> str:
        """Say what a figure is, with the names of its sources: as the profile does, or what is known of it else."""
        other = "measured on the machine" if self.measured else "as given, without a source"
        return self.said.get(figure, other)

    def with_(self, **changes: Any) -> Self:
        """Copy it with other figures, in units of the International System."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise RecipeError(f"hardware has no figure '{name}'{did_you_mean(name, known)}")
        changes.setdefault("said", {name: text for name, text in self.said.items() if name not in changes})
        return replace(self, **changes)

    def scaled(self, figure: str, factor: float) -> Self:
        """Copy it with a figure, or all entries of a curve, multiplied: how elasticities are found."""
        if figure not in DIMENSIONS:
            raise RecipeError(f"hardware has no figure '{figure}' to scale{did_you_mean(figure, DIMENSIONS)}")
        value = getattr(self, figure)
        if value is None:
            raise RecipeError(f"{self.name}: {figure} is not set, so it cannot be scaled; set it first")
        changed = scaled(value, factor)
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

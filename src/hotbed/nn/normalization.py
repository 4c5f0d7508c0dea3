"""Normalize numerical inputs inside a model, by statistics of the data that are part of its state.

A source hands the numbers of `Schema.numericals` as they are stored. `normalize` gives a model a submodule
``normalization``, which replaces ``batch.dense`` before each call of the model. Its constants are measured once, over
the train split, and are buffers: checkpoints have them, so training, evaluation, prediction and export do the same.

Raw numbers are float64 and inputs float32, so a model that nobody normalizes refuses them instead of training badly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, Literal, TypeVar, cast
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed.data import Schema, Source
from hotbed.data.columns import Numerical
from hotbed.data.files.column_statistics import ColumnStatistics
from hotbed.embed import Distributed
from hotbed.errors import BatchError, DataError, SpecError

INTERVALS = 64
"""Between the quantiles that the rule ``quantile`` knows."""
_NAME = "normalization"
Model = TypeVar("Model", bound=nn.Module)
Part = Literal["center", "scale"]


def normalize(model: Model, schema: Schema) -> Model:
    """Let a model normalize the numericals of its batches, as a schema says.

    The model gets a submodule ``normalization`` (see `Normalization`), whose statistics have to be measured before it
    is called: ``hotbed train`` does, a loop of your own calls ``model.normalization.measure(source)``. It takes
    ``schema.dense_features`` dense inputs after that. Names of its parameters stay as they are.

    Parameters
    ----------
    model
        Takes a `Batch` as its first argument; it is changed in place, and must not be distributed yet.
    schema
        The columns of the batch's ``dense``; without ``numericals`` the model stays as it is.

    Returns
    -------
    nn.Module
        The model.

    Raises
    ------
    SpecError
        If the model has an attribute ``normalization`` already, or is distributed.
    """
    if not schema.numericals:
        return model
    if isinstance(model, Distributed):
        raise SpecError("the model is distributed already; call hotbed.nn.normalize before hotbed.distribute")
    if hasattr(model, _NAME):
        raise SpecError(
            f"{type(model).__name__} has an attribute '{_NAME}' already, so hotbed.nn.normalize cannot add its own; "
            "normalize a model once, and rename an attribute of yours"
        )
    model.add_module(_NAME, Normalization(schema))
    model.register_forward_pre_hook(_replace_dense, with_kwargs=True)
    return model


def normalization_of(model: nn.Module) -> Normalization | None:
    """The submodule that `normalize` gave a model; None where there is none."""
    return next((module for module in model.modules() if isinstance(module, Normalization)), None)


def take_raw(model: nn.Module, schema: Schema) -> None:
    """Let a model normalize also the columns that its source scales, for programs that have no source."""
    scaled = {s.name: Numerical(name=s.name, rule="asinh", center=s.center, scale=s.scale) for s in schema.scaling}
    rules = {n.name: n for n in schema.numericals} | scaled
    ordered = tuple(rules[name] for name in schema.dense if name in rules)
    if not scaled:
        return
    raw, before = replace(schema, scaling=(), numericals=ordered), normalization_of(model)
    if before is None:
        normalize(model, raw)
        return
    whole = Normalization(raw)
    whole.load_state_dict(before.state_dict())
    setattr(model, _NAME, whole)


def _replace_dense(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Normalize the numericals of the batch among the arguments of a call."""
    own = cast(Normalization, getattr(model, _NAME))

    def changed(value: Any) -> Any:
        if not is_dataclass(value) or isinstance(value, type) or not hasattr(value, "dense"):
            return value
        batch: Any = value
        return replace(batch, dense=own.of_batch(batch.dense))

    return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}


class Normalization(nn.Module):
    """Normalize dense columns ``[B, I]`` to inputs ``[B, schema.dense_features]`` float32.

    See `hotbed.data.Numerical` for what the rules do. The indicators of missing values come last, in the order of their
    columns. Columns that the schema gives no rule pass as they are.

    Each measured column has a float64 buffer of its own, named by column and rule, so that a warm start takes the
    statistics of those that are as they were: whether it is measured, then center and scale, or the values and places
    of the quantiles.

    Parameters
    ----------
    schema
        Names columns and rules.
    """

    buffers_are_constant = True  # DDP need not send them in each step

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self._names = schema.dense
        self._rules: Mapping[str, Numerical] = {n.name: n for n in schema.numericals}
        self._inputs = schema.dense_features
        self._keys = {n.name: f"{quote(n.name, safe=' ')}:{n.rule}".replace(".", "%2E") for n in schema.numericals}
        self._measured = [n for name in self._names if (n := self._rules.get(name)) is not None and n.is_measured]
        self._is_ready = False
        for numerical in self._measured:
            self.register_buffer(self._keys[numerical.name], torch.zeros(_size(numerical), dtype=torch.float64))
        for name, values in self._fixed().items():
            self.register_buffer(name, values, persistent=False)

    def _fixed(self) -> dict[str, Tensor]:
        """What the schema alone says of the columns, as tensors."""
        rules = [self._rules.get(name) for name in self._names]

        def those(condition: Callable[[Numerical], bool]) -> list[bool]:
            return [rule is not None and condition(rule) for rule in rules]

        def columns(condition: Callable[[Numerical], bool]) -> list[int]:
            return [i for i, chosen in enumerate(those(condition)) if chosen]

        given = [(0.0, 1.0) if r is None or r.center is None or r.scale is None else (r.center, r.scale) for r in rules]
        return {
            "_given": torch.tensor(given, dtype=torch.float64),
            "_is_log": torch.tensor(those(lambda rule: rule.rule == "log")),
            "_is_asinh": torch.tensor(those(lambda rule: rule.rule == "asinh")),
            "_fills": torch.tensor(those(lambda rule: rule.missing != "error")),
            "_quantiles": torch.tensor(columns(lambda rule: rule.rule == "quantile"), dtype=torch.int64),
            "_indicators": torch.tensor(columns(lambda rule: rule.missing == "indicator"), dtype=torch.int64),
        }

    def reset_parameters(self) -> None:
        """Forget all statistics; fills what was made on ``meta``."""
        device = next(self.buffers()).device
        for numerical in self._measured:
            self._buffers[self._keys[numerical.name]] = torch.zeros(
                _size(numerical), dtype=torch.float64, device=device
            )
        for name, values in self._fixed().items():
            self._buffers[name] = values.to(device)
        self._is_ready = False

    @property
    def unmeasured(self) -> list[str]:
        """Columns whose statistics are still to be measured."""
        return [n.name for n in self._measured if not float(self._statistics(n.name)[0])]

    def measure(
        self,
        source: Source,
        split: str | Sequence[str] = "train",
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Normalization:
        """Measure the columns that were not measured yet, in one pass that reads these columns only.

        Parameters
        ----------
        source
            Has the schema that the model was made for.
        split
            What to measure: one split, or several one after the other.
        progress
            Called with the samples done and those there are.

        Returns
        -------
        Normalization
            This module.

        Raises
        ------
        SpecError
            If the source has other dense columns.
        DataError
            If values are too large for the rule, or what the source raises.
        """
        if source.schema.dense != self._names:
            raise SpecError(
                f"the source has the dense columns {', '.join(source.schema.dense)}, and the model was normalized for "
                f"{', '.join(self._names)}; use the schema that hotbed.nn.normalize got"
            )
        wanted = {name: ColumnStatistics() for name in self.unmeasured}
        splits = [split] if isinstance(split, str) else list(split)
        chunks = [(name, i, n) for name in splits for i, n in enumerate(source.chunks(name))]
        done, total = 0, sum(n for _, _, n in chunks)
        for name, i, n in chunks if wanted else ():
            dense = source.read_numericals(name, i)
            if dense is None:
                raise BatchError(f"split '{name}' of the source has no dense columns, and the schema names some")
            values = dense.double().numpy()
            for column, statistics in wanted.items():
                of_column = values[:, self._names.index(column)]
                statistics.add(_logarithm(of_column) if self._rules[column].rule == "log" else of_column, done)
            done += n
            progress(done, total)
        found = {column: _constants(self._rules[column], statistics) for column, statistics in wanted.items()}
        with torch.no_grad():
            for column, constants in found.items():
                self._statistics(column).copy_(torch.from_numpy(constants))
        return self

    def assume_standard(self) -> None:
        """Take what was not measured for standardised already: for models that nothing is learned from."""
        for numerical in self._measured:
            values = self._statistics(numerical.name)
            if not float(values[0]):
                values.zero_()
                values[0] = values[-1] = 1.0

    def check_measured(self) -> None:
        """Raise `SpecError` if a column was not measured yet."""
        if not self._is_ready and (left := self.unmeasured):
            raise SpecError(
                f"numerical columns {', '.join(left)} are not measured, so they cannot be normalized; call "
                "model.normalization.measure(source) before training, or load a checkpoint"
            )
        self._is_ready = True

    def of_batch(self, dense: Tensor | None) -> Tensor:
        """Normalize what a batch has; a `BatchError` says what is wrong with it."""
        if dense is None or dense.shape[1] != len(self._names):
            has = "none" if dense is None else dense.shape[1]
            raise BatchError(f"the model normalizes {len(self._names)} dense columns, the batch has {has}")
        return self(dense)

    @override
    def forward(self, dense: Tensor) -> Tensor:
        """Normalize ``[B, I]``; in float64, as a large mean needs, whatever precision the model is trained in."""
        if not self._is_ready:
            self.check_measured()
        raw = dense.double()
        center, scale = self._constants()
        plain = torch.where(self._buffer("_is_log"), raw.sign() * raw.abs().log1p(), raw)
        distance = (plain - center) / scale
        out = torch.where(self._buffer("_is_asinh"), distance.asinh(), distance)
        ranked = [name for name in self._names if name in self._rules and self._rules[name].rule == "quantile"]
        if ranked:
            at = self._buffer("_quantiles")
            tables = torch.stack([self._statistics(name)[1:] for name in ranked])
            out = out.index_copy(1, at, _places(raw.index_select(1, at), tables))
        missing = ~raw.isfinite()
        out = torch.where(self._buffer("_fills") & (missing | ~out.isfinite()), 0.0, out).float()
        if self._inputs == len(self._names):
            return out
        return torch.cat([out, missing.index_select(1, self._buffer("_indicators")).float()], dim=1)

    def _constants(self) -> tuple[Tensor, Tensor]:
        """Center and scale of all columns ``[I]``."""
        given = self._buffer("_given")
        measured = {n.name for n in self._measured if n.rule != "quantile"}
        rows = [self._statistics(n)[1:] if n in measured else given[i] for i, n in enumerate(self._names)]
        both = torch.stack(rows)
        return both[:, 0], both[:, 1]

    def _statistics(self, column: str) -> Tensor:
        return self._buffer(self._keys[column])

    def _buffer(self, name: str) -> Tensor:
        return cast(Tensor, self._buffers[name])

    @override
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._is_ready = False
        super()._load_from_state_dict(*args, **kwargs)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Normalization:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, values in before.items():  # model.half() and .bfloat16() are of layers
            now = self._buffers[name]
            if values is not None and now is not None and now.dtype != values.dtype:
                self._buffers[name] = values.to(now.device)
        return self


def _size(numerical: Numerical) -> int:
    """Numbers in the buffer of a measured column."""
    return 1 + (2 * (INTERVALS + 1) if numerical.rule == "quantile" else 2)


def _logarithm(values: Any) -> Any:
    return np.sign(values) * np.log1p(np.abs(values))


def _constants(numerical: Numerical, statistics: ColumnStatistics) -> Any:
    """What the buffer of a measured column gets; a column without values, or of one value, becomes 0 everywhere."""
    if numerical.rule == "quantile":
        return np.concatenate([[1.0], *_quantile_table(statistics)])
    if not statistics.count:
        return np.array([1.0, 0.0, 1.0])
    center, scale = statistics.mean, statistics.deviation
    if numerical.rule == "asinh":
        center, scale = statistics.usual_distance()
    if statistics.low == statistics.high:
        center, scale = statistics.low, 1.0
    if not (math.isfinite(center) and math.isfinite(scale)):
        raise DataError(
            f"numerical column '{numerical.name}' has values from {statistics.low:g} to {statistics.high:g}, whose "
            "mean and deviation are beyond float64; use rule log, asinh or quantile, or mend the data"
        )
    return np.array([1.0, center, scale or 1.0])


def _quantile_table(statistics: ColumnStatistics) -> tuple[Any, Any]:
    """Values at which the place among all values is known, and the places, from −√3 to √3, of variance 1.

    A value that several quantiles have is at the mean of their places.
    """
    shares = np.linspace(0, 1, INTERVALS + 1)
    values = statistics.quantiles(shares) if statistics.count else np.zeros(INTERVALS + 1)
    distinct, of_share = np.unique(values, return_inverse=True)
    means = np.bincount(of_share, weights=shares) / np.bincount(of_share)
    more = INTERVALS + 1 - len(distinct)
    values, means = np.pad(distinct, (0, more), mode="edge"), np.pad(means, (0, more), mode="edge")
    return values, (means - 0.5) * math.sqrt(12)


def _places(values: Tensor, tables: Tensor) -> Tensor:
    """Places ``[B, Q]`` of values by the tables of their columns ``[Q, 2 · (INTERVALS + 1)]``, on lines between."""
    at, places = (part.contiguous() for part in tables.split(INTERVALS + 1, dim=1))
    by_column = values.t().contiguous()
    upper = torch.searchsorted(at, by_column, right=True).clamp(1, INTERVALS)
    low, high = at.gather(1, upper - 1), at.gather(1, upper)
    first, last = places.gather(1, upper - 1), places.gather(1, upper)
    width = torch.where(high > low, high - low, 1.0)
    share = ((by_column - low) / width).clamp(0, 1)
    return (first + share * (last - first)).t()

"""Normalize numerical inputs inside a model, with statistics of the data that are part of the model's state.

A source returns the numbers of `Schema.numericals` as they are stored. `normalize` adds a submodule ``normalization``
to a model. It replaces ``batch.dense`` before each call of the model. Its constants are measured once, over the train
split. They are buffers and part of checkpoints, so training, evaluation, prediction and export use the same constants.

Raw numbers are float64 and inputs are float32. Therefore a model without normalization raises an error for raw numbers
instead of training badly.
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
"""Number of intervals between the quantiles of the rule ``quantile``."""
_NAME = "normalization"
Model = TypeVar("Model", bound=nn.Module)
Part = Literal["center", "scale"]


def normalize(model: Model, schema: Schema) -> Model:
    """Add a submodule to a model that normalizes the numericals of its batches by the rules of a schema.

    The submodule is ``normalization`` (see `Normalization`). Its statistics must be measured before the model is
    called. ``hotbed train`` measures them. In a custom loop, call ``model.normalization.measure(source)``. The model
    must have ``schema.dense_features`` dense inputs. The names of its parameters do not change.

    Parameters
    ----------
    model
        Model with a `Batch` as its first argument. It is changed in place, and must not be distributed yet.
    schema
        Schema with the columns of the batch's ``dense``. Without ``numericals``, the model does not change.

    Returns
    -------
    nn.Module
        The model.

    Raises
    ------
    SpecError
        If the model already has an attribute ``normalization``, or is distributed.
    """
    if not schema.numericals:
        return model
    if isinstance(model, Distributed):
        raise SpecError("the model is already distributed. Call hotbed.nn.normalize before hotbed.distribute")
    if hasattr(model, _NAME):
        raise SpecError(
            f"{type(model).__name__} already has an attribute '{_NAME}', so hotbed.nn.normalize cannot add its own. "
            "Normalize a model once, and rename other attributes"
        )
    model.add_module(_NAME, Normalization(schema))
    model.register_forward_pre_hook(_replace_dense, with_kwargs=True)
    return model


def normalization_of(model: nn.Module) -> Normalization | None:
    """Return the submodule that `normalize` added to a model, or None."""
    return next((module for module in model.modules() if isinstance(module, Normalization)), None)


def take_raw(model: nn.Module, schema: Schema) -> None:
    """Change a model so that it also normalizes the columns that its source scales, for programs without a source."""
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
    """Normalize the numericals of the batch in the arguments of a call."""
    own = cast(Normalization, getattr(model, _NAME))

    def change(value: Any) -> Any:
        if not is_dataclass(value) or isinstance(value, type) or not hasattr(value, "dense"):
            return value
        batch: Any = value
        return replace(batch, dense=own.normalize_batch(batch.dense))

    return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}


class Normalization(nn.Module):
    """Normalize dense columns ``[B, I]`` to inputs ``[B, schema.dense_features]`` float32.

    `hotbed.data.Numerical` defines the rules. The indicators of missing values come last, in the order of their
    columns. Columns without a rule in the schema are not changed.

    Each measured column has a separate float64 buffer, which is named by column and rule. Therefore a warm start copies
    the statistics of unchanged columns. The buffer has a flag that the column is measured, then its center and scale,
    or the values and positions of its quantiles.

    Parameters
    ----------
    schema
        Schema with the columns and rules.
    """

    buffers_are_constant = True  # DDP does not need to send them in each step

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
        for name, values in self._create_constants().items():
            self.register_buffer(name, values, persistent=False)

    def _create_constants(self) -> dict[str, Tensor]:
        """Create the tensors that depend only on the schema."""
        rules = [self._rules.get(name) for name in self._names]

        def mask_of(condition: Callable[[Numerical], bool]) -> list[bool]:
            return [rule is not None and condition(rule) for rule in rules]

        def columns(condition: Callable[[Numerical], bool]) -> list[int]:
            return [i for i, chosen in enumerate(mask_of(condition)) if chosen]

        given = [(0.0, 1.0) if r is None or r.center is None or r.scale is None else (r.center, r.scale) for r in rules]
        return {
            "_given": torch.tensor(given, dtype=torch.float64),
            "_is_log": torch.tensor(mask_of(lambda rule: rule.rule == "log")),
            "_is_asinh": torch.tensor(mask_of(lambda rule: rule.rule == "asinh")),
            "_fills": torch.tensor(mask_of(lambda rule: rule.missing != "error")),
            "_quantiles": torch.tensor(columns(lambda rule: rule.rule == "quantile"), dtype=torch.int64),
            "_indicators": torch.tensor(columns(lambda rule: rule.missing == "indicator"), dtype=torch.int64),
        }

    def reset_parameters(self) -> None:
        """Clear all statistics. It also initializes buffers that were created on the device ``meta``."""
        device = next(self.buffers()).device
        for numerical in self._measured:
            self._buffers[self._keys[numerical.name]] = torch.zeros(
                _size(numerical), dtype=torch.float64, device=device
            )
        for name, values in self._create_constants().items():
            self._buffers[name] = values.to(device)
        self._is_ready = False

    @property
    def unmeasured(self) -> list[str]:
        """Return the columns that still need to be measured."""
        return [n.name for n in self._measured if not float(self._statistics(n.name)[0])]

    def measure(
        self,
        source: Source,
        split: str | Sequence[str] = "train",
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Normalization:
        """Measure the columns that were not measured yet, in one pass that reads only these columns.

        Parameters
        ----------
        source
            Source with the schema that `normalize` got.
        split
            Name of one split, or names of several splits.
        progress
            Called with the number of measured samples and the total number.

        Returns
        -------
        Normalization
            This module.

        Raises
        ------
        SpecError
            If the source has other dense columns.
        DataError
            If values are too large for the rule, or the source raises it.
        """
        if source.schema.dense != self._names:
            raise SpecError(
                f"dense columns of the source: got {', '.join(source.schema.dense)}, expected "
                f"{', '.join(self._names)} as in the schema that was passed to hotbed.nn.normalize. Use that schema"
            )
        wanted = {name: ColumnStatistics() for name in self.unmeasured}
        splits = [split] if isinstance(split, str) else list(split)
        chunks = [(name, i, n) for name in splits for i, n in enumerate(source.chunks(name))]
        done, total = 0, sum(n for _, _, n in chunks)
        for name, i, n in chunks if wanted else ():
            dense = source.read_numericals(name, i)
            if dense is None:
                raise BatchError(f"split '{name}' of the source: got no dense columns, expected the schema's columns")
            values = dense.double().numpy()
            for column, statistics in wanted.items():
                of_column = values[:, self._names.index(column)]
                statistics.add(_logarithm(of_column) if self._rules[column].rule == "log" else of_column, done)
            done += n
            progress(done, total)
        found = {column: _compute_buffer(self._rules[column], statistics) for column, statistics in wanted.items()}
        with torch.no_grad():
            for column, constants in found.items():
                self._statistics(column).copy_(torch.from_numpy(constants))
        return self

    def assume_standard(self) -> None:
        """Set center 0 and scale 1 for columns that were not measured, for models that are not trained on data."""
        for numerical in self._measured:
            values = self._statistics(numerical.name)
            if not float(values[0]):
                values.zero_()
                values[0] = values[-1] = 1.0

    def check_measured(self) -> None:
        """Raise `SpecError` if a column was not measured yet."""
        if not self._is_ready and (left := self.unmeasured):
            raise SpecError(
                f"numerical columns {', '.join(left)} are not measured, so they cannot be normalized. Call "
                "model.normalization.measure(source) before training, or load a checkpoint"
            )
        self._is_ready = True

    def normalize_batch(self, dense: Tensor | None) -> Tensor:
        """Normalize the dense inputs of a batch. Raise `BatchError` if they do not match the schema."""
        if dense is None or dense.shape[1] != len(self._names):
            has = "none" if dense is None else dense.shape[1]
            raise BatchError(f"dense columns of the batch: got {has}, expected {len(self._names)} to normalize")
        return self(dense)

    @override
    def forward(self, dense: Tensor) -> Tensor:
        """Normalize ``[B, I]``. It computes in float64, because a large mean needs this precision."""
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
            out = out.index_copy(1, at, _interpolate(raw.index_select(1, at), tables))
        missing = ~raw.isfinite()
        out = torch.where(self._buffer("_fills") & (missing | ~out.isfinite()), 0.0, out).float()
        if self._inputs == len(self._names):
            return out
        return torch.cat([out, missing.index_select(1, self._buffer("_indicators")).float()], dim=1)

    def _constants(self) -> tuple[Tensor, Tensor]:
        """Return center and scale of all columns ``[I]``."""
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
        for name, values in before.items():  # model.half() and .bfloat16() must only change layers
            now = self._buffers[name]
            if values is not None and now is not None and now.dtype != values.dtype:
                self._buffers[name] = values.to(now.device)
        return self


def _size(numerical: Numerical) -> int:
    """Return the size of the buffer of a measured column."""
    return 1 + (2 * (INTERVALS + 1) if numerical.rule == "quantile" else 2)


def _logarithm(values: Any) -> Any:
    return np.sign(values) * np.log1p(np.abs(values))


def _compute_buffer(numerical: Numerical, statistics: ColumnStatistics) -> Any:
    """Compute the buffer of a measured column. A column without values, or with one distinct value, becomes 0."""
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
            f"numerical column '{numerical.name}': got values from {statistics.low:g} to {statistics.high:g}, expected "
            "a mean and a deviation within float64. Use rule log, asinh or quantile, or repair the data"
        )
    return np.array([1.0, center, scale or 1.0])


def _quantile_table(statistics: ColumnStatistics) -> tuple[Any, Any]:
    """Return the values of quantiles and their positions from −√3 to √3, which have variance 1.

    A value of several quantiles has the mean of their positions.
    """
    shares = np.linspace(0, 1, INTERVALS + 1)
    values = statistics.quantiles(shares) if statistics.count else np.zeros(INTERVALS + 1)
    distinct, of_share = np.unique(values, return_inverse=True)
    means = np.bincount(of_share, weights=shares) / np.bincount(of_share)
    more = INTERVALS + 1 - len(distinct)
    values, means = np.pad(distinct, (0, more), mode="edge"), np.pad(means, (0, more), mode="edge")
    return values, (means - 0.5) * math.sqrt(12)


def _interpolate(values: Tensor, tables: Tensor) -> Tensor:
    """Interpolate positions ``[B, Q]`` of values in the quantile tables ``[Q, 2 · (INTERVALS + 1)]``."""
    at, positions = (part.contiguous() for part in tables.split(INTERVALS + 1, dim=1))
    by_column = values.t().contiguous()
    upper = torch.searchsorted(at, by_column, right=True).clamp(1, INTERVALS)
    low, high = at.gather(1, upper - 1), at.gather(1, upper)
    first, last = positions.gather(1, upper - 1), positions.gather(1, upper)
    width = torch.where(high > low, high - low, 1.0)
    share = ((by_column - low) / width).clamp(0, 1)
    return (first + share * (last - first)).t()

"""Define what passes between optimizers and the tables they train: rules, hyperparameters, moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Moment:
    """State that a rule keeps: one float32 per row, or one per element.

    Attributes
    ----------
    name
        Key in the optimizer's state.
    per
        What there is one of.
    initial
        Option of the optimizer that it starts at; 0 where there is none.
    """

    name: str
    per: Literal["row", "element"]
    initial: str | None = None

    def nbytes(self, cols: int) -> int:
        """Bytes of it beside a row of so many columns."""
        return 4 if self.per == "row" else 4 * cols


@dataclass(frozen=True)
class Rule:
    """What the kernels need to know of an optimizer.

    Attributes
    ----------
    name
        Which formula.
    hyper
        The rule's own hyperparameters in kernel order; `COMMON` ones come before them.
    moments
        State beside each row, at most two.
    corrected
        Own hyperparameters β for which the kernels also get the bias correction ``1 − β^step``, in this order, after
        ``hyper``.
    """

    name: str
    hyper: tuple[str, ...] = ()
    moments: tuple[Moment, ...] = ()
    corrected: tuple[str, ...] = ()


COMMON = ("lr", "max_grad_norm", "max_norm", "l2", "decay")
"""Hyperparameters of every rule, in kernel order.

Learning rate; largest norm of a row's gradient (∞: any); largest norm of an updated row (∞: any); λ of ``g ← g + λw``
(0: none); ``lr · λ`` of ``w ← w − lr · λ · w`` (0: none).
"""


class Updater(Protocol):
    """One optimizer's end of a collection: gradients wait here until the step.

    Attributes
    ----------
    tables
        Those it trains.
    """

    tables: set[str]

    def apply(self, hyper: Mapping[str, Sequence[float]], inv_scale: Tensor | None, gate: Tensor | None) -> None:
        """Apply everything that waits to the tables named in ``hyper``, and forget it.

        ``hyper`` gives each table its `COMMON` and own hyperparameters, in kernel order.
        """
        ...

    def clear(self) -> None:
        """Forget everything that waits."""
        ...

    def finite(self) -> Tensor:
        """0-d bool: whether every waiting gradient is finite."""
        ...

    def state(self, table: str) -> dict[str, Tensor]:
        """A table's moments (``[R]`` or ``[R, D]``) and its ``step`` (0-d int64); views where it is whole here."""
        ...

    def load_state(self, table: str, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, of this or another model."""
        ...


@runtime_checkable
class SparseModule(Protocol):
    """A module with embedding tables, as optimizers see it."""

    handles: dict[str, Tensor]

    @property
    def replicas(self) -> int:
        """How many copies of its tables are trained apart and averaged; 1 where there are none."""
        ...

    def connect(
        self, rule: Rule, fill: Mapping[str, Mapping[str, float]], on_grad: Callable[[Callable[[], Tensor]], None]
    ) -> Updater:
        """Let an optimizer train the tables in ``fill``, which says what each of a table's moments starts at.

        ``on_grad`` is called for every gradient that arrives, with what says (0-d bool) whether all of it is finite.
        """
        ...

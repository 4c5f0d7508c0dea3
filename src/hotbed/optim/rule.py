"""Define the interface between optimizers and the tables they train: rules, hyperparameters, moments.

A `Rule` carries its formula in plain PyTorch, which every kernel of the rule must equal bit for bit. So a rule can be
defined outside of hotbed, too: collections with ``backend="reference"`` run the formula itself. docs/extending.md shows
both: a rule in a file of your own, and one with kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from hotbed.checks import check_known
from hotbed.errors import SpecError

Steps = Generator[Tensor, Tensor, Tensor]
"""Yields what is to be summed over the columns of each row ``[U, cols]``, is sent the sums ``[U]``, returns rows."""

Formula = Callable[[Tensor, dict[str, Tensor], Tensor, Mapping[str, Tensor], int], Tensor | Steps]
"""``formula(w, moments, g, h, dim)``: what a rule does to rows ``w [U, cols]`` with summed gradients ``g [U, cols]``.

Returns the new rows. ``moments`` has the rule's state by name, ``[U]`` or ``[U, cols]`` float32, and is changed in
place; ``h`` has ``"lr"``, each name of `Rule.hyper`, and ``"1 - NAME^t"`` for each of `Rule.corrected`, ``[U, 1]``.

The columns may be only some of the ``dim`` of a row, for tables that are cut into columns. A formula that needs sums
over all columns is a generator function: ``square = (yield g * g)`` is ``[U]``. Each row is computed from its own
values alone.
"""

_formulas: dict[str, Formula] = {}


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
        By which backends find their kernel, and checkpoints say whose the moments are.
    formula
        What it does to rows; see `Formula`.
    hyper
        The rule's own hyperparameters in kernel order; `COMMON` ones come before them.
    moments
        State beside each row, at most two.
    corrected
        Own hyperparameters β for which the kernels also get the bias correction ``1 − β^step``, in this order, after
        ``hyper``.

    Raises
    ------
    SpecError
        If there are more than two moments, two of one name, a corrected name that is not in ``hyper``, or another
        formula of that name.
    """

    name: str
    formula: Formula
    hyper: tuple[str, ...] = ()
    moments: tuple[Moment, ...] = ()
    corrected: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [moment.name for moment in self.moments]
        if len(names) > MOST_MOMENTS or len(set(names)) < len(names):
            raise SpecError(
                f"rule '{self.name}' has moments {names}; it can have {MOST_MOMENTS} at most, of different names"
            )
        for name in self.corrected:
            check_known(f"rule '{self.name}' corrects", name, self.hyper, SpecError)
        known = _formulas.get(self.name, self.formula)
        if _path(known) != _path(self.formula):
            raise SpecError(
                f"rule '{self.name}' has the formula {_path(known)} already, not {_path(self.formula)}; give the new "
                "rule another name"
            )
        _formulas[self.name] = self.formula


def _path(formula: Formula) -> str:
    """Import path of a formula; it is the same when a module or a notebook's cell is run again."""
    return f"{formula.__module__}.{formula.__qualname__}"


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root of float32; ``torch.sqrt`` is not on every CPU."""
    return x.double().sqrt().float()


MOST_MOMENTS = 2
"""Of a rule; kernels take two."""

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
    optimizer
        Returns the optimizer, or None if it is gone.
    """

    tables: set[str]
    optimizer: Callable[[], Any]

    @property
    def is_waiting(self) -> bool:
        """Whether any gradient waits for a step."""
        ...

    def apply(self, hyper: Mapping[str, Sequence[float]], inv_scale: Tensor | None, gate: Tensor | None) -> None:
        """Apply everything that waits to the tables named in ``hyper``, and forget it.

        ``hyper`` gives each table its `COMMON` and own hyperparameters, in kernel order.
        """
        ...

    def prepare(self, hyper: Mapping[str, Sequence[float]]) -> Hashable:
        """Write these hyperparameters where `apply` has kernels read them; return what else `apply` makes of them."""
        ...

    def clear(self) -> None:
        """Forget everything that waits."""
        ...

    def finite(self) -> Tensor:
        """0-d bool: whether every waiting gradient is finite."""
        ...

    def square_sums(self, trained: Collection[str], factor: Tensor | None) -> Tensor:
        """Sum the squares of the gradients that wait, times ``factor``, of some tables; see `hotbed.ops.exact_sum`."""
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
    max_norms: dict[str, float]
    """By table that has one: the largest norm of a row after its update, whatever an optimizer's own option."""
    kept: list[object]
    """Optimizers that step in backward, which nobody else need keep; copies of the module have none."""

    @property
    def replicas(self) -> int:
        """How many copies of its tables are trained separately and averaged; 1 where there are none."""
        ...

    def connect(
        self,
        rule: Rule,
        fill: Mapping[str, Mapping[str, float]],
        on_grad: Callable[[Callable[[], Tensor]], None],
        beside: Sequence[Updater] = (),
    ) -> Updater:
        """Let an optimizer train the tables in ``fill``, which says what each of a table's moments starts at.

        ``on_grad`` is called for every gradient that arrives, with what says (0-d bool) whether all of it is finite.
        ``beside`` are the optimizer's updaters of other collections; one of them is returned if it is to train these
        tables, too, whose names are then unique among all of its tables.
        """
        ...

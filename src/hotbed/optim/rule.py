"""Define the interface between optimizers and the tables they train: rules, hyperparameters and moments.

A `Rule` has its formula in plain PyTorch. Every kernel of the rule must compute the same bits as the formula. A rule
can also be defined outside of hotbed, because collections with ``backend="reference"`` run the formula itself.
docs/extending.md shows a rule in a separate file, and a rule with kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from hotbed.checks import check_known
from hotbed.errors import SpecError

Steps = Generator[Tensor, Tensor, Tensor]
"""A generator that yields terms ``[U, cols]``, receives their sums over each row ``[U]``, and returns the new rows."""

Formula = Callable[[Tensor, dict[str, Tensor], Tensor, Mapping[str, Tensor], int], Tensor | Steps]
"""``formula(w, moments, g, h, dim)`` returns rows ``w [U, cols]`` after a step with summed gradients ``g [U, cols]``.

``moments`` has the rule's state by name, ``[U]`` or ``[U, cols]`` float32. The formula updates it in place. ``h`` has
``"lr"``, each name of `Rule.hyper`, and ``"1 - NAME^t"`` for each name of `Rule.corrected`, all ``[U, 1]``.

In tables with column shards, ``cols`` may be less than the ``dim`` of a row. A formula that needs sums over all columns
is a generator function. For example, ``square = (yield g * g)`` is ``[U]``. Each row must be computed from its own
values only.
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
        Whether the state has a float32 per row or per element.
    initial
        Name of the optimizer option that has the initial value. None: the initial value is 0.
    """

    name: str
    per: Literal["row", "element"]
    initial: str | None = None

    def nbytes(self, cols: int) -> int:
        """Return the bytes of this state for a row of ``cols`` columns."""
        return 4 if self.per == "row" else 4 * cols


@dataclass(frozen=True)
class Rule:
    """Description of an optimizer for the kernels.

    Attributes
    ----------
    name
        Backends find their kernel by this name. Checkpoints store it next to the moments.
    formula
        Computes the new rows; see `Formula`.
    hyper
        The rule's own hyperparameters in kernel order. The hyperparameters in `COMMON` come before them.
    moments
        State of each row, at most two.
    corrected
        Names β in ``hyper``. For each of them, kernels also get the bias correction ``1 − β^step``, in this order,
        after ``hyper``.

    Raises
    ------
    SpecError
        If the rule has more than two moments, or two moments of one name. Also if a name in ``corrected`` is not in
        ``hyper``, or a rule of this name has another formula.

    Examples
    --------
    >>> def shrink(w, moments, g, h, dim):
    ...     return h["keep"] * w - h["lr"] * g
    >>> rule = Rule("shrink", shrink, hyper=("keep",))
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
                f"rule '{self.name}': got moments {names}, expected at most {MOST_MOMENTS} of different names"
            )
        for name in self.corrected:
            check_known(f"rule '{self.name}' corrects", name, self.hyper, SpecError)
        known = _formulas.get(self.name, self.formula)
        if _path(known) != _path(self.formula):
            raise SpecError(
                f"rule '{self.name}': got the formula {_path(self.formula)}, but a rule of this name has "
                f"{_path(known)}. Use another name"
            )
        _formulas[self.name] = self.formula


def _path(formula: Formula) -> str:
    """Return the import path of a formula. It does not change if a module or a notebook cell runs again."""
    return f"{formula.__module__}.{formula.__qualname__}"


def sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of float32. ``torch.sqrt`` is not correctly rounded on every CPU."""
    return x.double().sqrt().float()


MOST_MOMENTS = 2
"""Largest number of moments of a rule, because kernels have two arguments for them."""

COMMON = ("lr", "max_grad_norm", "max_norm", "l2", "decay")
"""Hyperparameters of every rule, in kernel order.

They are the learning rate, the largest norm of a row's gradient (∞: no limit), the largest norm of an updated row (∞:
no limit), λ of ``g ← g + λw`` (0: no decay), and ``lr · λ`` of ``w ← w − lr · λ · w`` (0: no decay).
"""


class Updater(Protocol):
    """Keeps the gradients of a collection's tables until one optimizer's next step.

    Attributes
    ----------
    tables
        Names of the tables that the optimizer trains.
    optimizer
        Returns the optimizer, or None if it was deleted.
    """

    tables: set[str]
    optimizer: Callable[[], Any]

    @property
    def is_waiting(self) -> bool:
        """Return whether any gradient waits for a step."""
        ...

    def apply(self, hyper: Mapping[str, Sequence[float]], inv_scale: Tensor | None, gate: Tensor | None) -> None:
        """Apply the waiting gradients to the tables in ``hyper``, and discard the gradients.

        ``hyper`` maps each table to its `COMMON` and own hyperparameters, in kernel order.
        """
        ...

    def prepare(self, hyper: Mapping[str, Sequence[float]]) -> Hashable:
        """Write hyperparameters to the buffers that kernels of `apply` read. Return a key of all other dependencies."""
        ...

    def clear(self) -> None:
        """Discard the waiting gradients."""
        ...

    def finite(self) -> Tensor:
        """Return whether every waiting gradient is finite, a 0-d bool tensor."""
        ...

    def square_sums(self, trained: Collection[str], factor: Tensor | None) -> Tensor:
        """Sum the squares of ``factor`` times the waiting gradients of some tables; see `hotbed.ops.exact_sum`."""
        ...

    def state(self, table: str) -> dict[str, Tensor]:
        """Return a table's moments (``[R]`` or ``[R, D]``) and ``step`` (0-d int64).

        The moments are views if this rank has the whole table.
        """
        ...

    def load_state(self, table: str, state: Mapping[str, Tensor]) -> None:
        """Copy a state that `state` returned, of this or another model."""
        ...


@runtime_checkable
class SparseModule(Protocol):
    """A module with embedding tables that optimizers can train."""

    handles: dict[str, Tensor]
    max_norms: dict[str, float]
    """Largest norm of a row after its update, by table. It applies in addition to the option of an optimizer."""
    kept: list[object]
    """Optimizers that step in backward. The module keeps them alive; copies of the module have none."""

    @property
    def replicas(self) -> int:
        """Return the number of replicas of its tables that are trained separately and averaged (1 without replicas)."""
        ...

    def connect(
        self,
        rule: Rule,
        fill: Mapping[str, Mapping[str, float]],
        on_grad: Callable[[Callable[[], Tensor]], None],
        beside: Sequence[Updater] = (),
    ) -> Updater:
        """Return the updater through which an optimizer trains the tables in ``fill``.

        ``fill`` has the initial value of each moment of each table. ``on_grad`` is called for every gradient that
        arrives. Its argument is a function that returns whether the gradient is finite (0-d bool). ``beside`` has the
        optimizer's updaters of other collections. If one of them can also train these tables, it is returned. The names
        of all its tables are then unique.
        """
        ...

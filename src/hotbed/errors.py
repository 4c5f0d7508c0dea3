"""Define every exception that hotbed raises on purpose.

::

    HotbedError
    ├── SpecError (ValueError)          a table, feature, schema or module argument that cannot be right
    ├── RecipeError (ValueError)        a recipe, hardware profile or command-line argument
    ├── PlanError (ValueError)          a sharding plan that does not fit its tables, ranks or memory
    ├── BatchError (ValueError)         a batch that does not fit the features it is given to
    ├── DataError (ValueError)          a source file whose content is not what its format says
    ├── CheckpointError (RuntimeError)  a checkpoint that is absent, damaged or of another model
    │   ├── DamagedError                one whose content is not what was written
    │   └── NotOursError                a directory that another run has taken over
    ├── StoreError (RuntimeError)       rows that do not fit where they are to be
    ├── BackendError (RuntimeError)     a kernel backend that was asked for and cannot run here
    ├── CommError (RuntimeError)        an exchange between ranks that failed or timed out
    ├── OptimizerError (RuntimeError)   an optimizer used in a way that would lose or repeat an update
    ├── WorkerError (RuntimeError)      workers of an executor that died, or a cluster that does not answer
    ├── RequestError (ValueError)       a request that a server does not answer with scores
    ├── StoppedError (RuntimeError)     training that was told to stop, and saved a checkpoint
    └── NonFiniteError (ArithmeticError) a loss that is NaN or infinite

Each message states the value, the limit it broke and how to mend it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class HotbedError(Exception):
    """Base class of all errors raised by hotbed."""


class SpecError(HotbedError, ValueError):
    """A table, feature, schema or module argument that cannot be right."""


class RecipeError(HotbedError, ValueError):
    """A recipe, hardware profile or command-line argument that cannot be right."""


class PlanError(HotbedError, ValueError):
    """A sharding plan that does not fit its tables, ranks or memory."""


class BatchError(HotbedError, ValueError):
    """A batch that does not fit the features it is given to."""


class DataError(HotbedError, ValueError):
    """A source file whose content is not what its format says."""


class CheckpointError(HotbedError, RuntimeError):
    """A checkpoint that is absent, damaged or made for another model."""


class DamagedError(CheckpointError):
    """A checkpoint whose content is not what was written."""


class NotOursError(CheckpointError):
    """A directory of checkpoints that another run has taken over."""


class StoreError(HotbedError, RuntimeError):
    """Rows of tables that do not fit where they are to be kept."""


class BackendError(HotbedError, RuntimeError):
    """A kernel backend that was asked for and cannot run here."""


class CommError(HotbedError, RuntimeError):
    """An exchange between ranks that failed or timed out."""


class OptimizerError(HotbedError, RuntimeError):
    """An optimizer used in a way that would lose or repeat an update."""


class WorkerError(HotbedError, RuntimeError):
    """Workers of an executor that died again and again, or a cluster that does not answer."""


class RequestError(HotbedError, ValueError):
    """A request that a server does not answer with scores.

    ``status`` is of the HTTP answer, and ``reason`` a short name for metrics and logs.
    """

    def __init__(
        self, message: str, status: int = 400, reason: str = "malformed", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.headers = status, reason, dict(headers or {})


class StoppedError(HotbedError, RuntimeError):
    """Training, or a server, that was told to stop by a signal before it was over; ``signal`` is its number."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class NonFiniteError(HotbedError, ArithmeticError):
    """A loss that is NaN or infinite."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, whatever its case, or an empty string."""
    names = list(known)
    by_letters = {one.casefold(): one for one in reversed(names)}
    close = difflib.get_close_matches(name, names, n=1)
    if name.casefold() in by_letters:
        close = [by_letters[name.casefold()]]
    return f"; did you mean '{close[0]}'?" if close else ""

"""Define every exception that hotbed raises on purpose.

::

    HotbedError
    ├── SpecError (ValueError)          an invalid argument of a table, feature, schema or module
    ├── RecipeError (ValueError)        an invalid recipe, hardware profile or command-line argument
    ├── PlanError (ValueError)          a sharding plan that does not fit its tables, ranks or memory
    ├── BatchError (ValueError)         a batch that does not match the model's features
    ├── DataError (ValueError)          a data file with content that its format does not allow
    ├── CheckpointError (RuntimeError)  a checkpoint that is missing, damaged or for a different model
    │   ├── DamagedError                a checkpoint with bytes that differ from the written ones
    │   └── NotOursError                a directory of checkpoints that a different run has taken over
    ├── StoreError (RuntimeError)       rows that do not fit into their memory
    ├── BackendError (RuntimeError)     a requested kernel backend that cannot run on this machine
    ├── CommError (RuntimeError)        an exchange between ranks that failed or timed out
    ├── OptimizerError (RuntimeError)   a use of an optimizer that would lose or repeat an update
    ├── WorkerError (RuntimeError)      workers of an executor that died, or a cluster that does not answer
    ├── RequestError (ValueError)       a request that a server refuses
    ├── StoppedError (RuntimeError)     training or serving that a signal stopped
    └── NonFiniteError (ArithmeticError) a loss that is NaN or infinite

Each message names the value and the limit that it exceeds, and says how to fix the problem.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class HotbedError(Exception):
    """Base class of all errors raised by hotbed."""


class SpecError(HotbedError, ValueError):
    """An argument of a table, feature, schema or module is invalid."""


class RecipeError(HotbedError, ValueError):
    """A recipe, hardware profile or command-line argument is invalid."""


class PlanError(HotbedError, ValueError):
    """A sharding plan does not fit its tables, ranks or memory."""


class BatchError(HotbedError, ValueError):
    """A batch does not match the model's features."""


class DataError(HotbedError, ValueError):
    """A data file has content that its format does not allow."""


class CheckpointError(HotbedError, RuntimeError):
    """A checkpoint is missing, damaged, or for a different model."""


class DamagedError(CheckpointError):
    """The bytes of a checkpoint differ from the written ones."""


class NotOursError(CheckpointError):
    """A different run has taken over a directory of checkpoints."""


class StoreError(HotbedError, RuntimeError):
    """Rows of tables do not fit into their memory."""


class BackendError(HotbedError, RuntimeError):
    """A requested kernel backend cannot run on this machine."""


class CommError(HotbedError, RuntimeError):
    """An exchange between ranks failed or timed out."""


class OptimizerError(HotbedError, RuntimeError):
    """A use of an optimizer would lose or repeat an update."""


class WorkerError(HotbedError, RuntimeError):
    """Workers of an executor died repeatedly, or a cluster does not answer."""


class RequestError(HotbedError, ValueError):
    """A server refuses a request.

    ``status`` is the HTTP status of the answer, and ``reason`` is a short name for metrics and logs.
    """

    def __init__(
        self, message: str, status: int = 400, reason: str = "malformed", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.headers = status, reason, dict(headers or {})


class StoppedError(HotbedError, RuntimeError):
    """A signal with the number ``signal`` stopped training or a server."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class NonFiniteError(HotbedError, ArithmeticError):
    """A loss is NaN or infinite."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, ignoring case, or an empty string."""
    names = list(known)
    by_letters = {one.casefold(): one for one in reversed(names)}
    close = difflib.get_close_matches(name, names, n=1)
    if name.casefold() in by_letters:
        close = [by_letters[name.casefold()]]
    return f"; did you mean '{close[0]}'?" if close else ""

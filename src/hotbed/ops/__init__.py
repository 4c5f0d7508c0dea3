"""Provide the operations on rows in three backends with the same signatures.

``reference.py`` defines the operations in plain PyTorch, and all tests compare with it. ``cpu_*.py`` use Numba, and
``triton_*.py`` use Triton. `select` chooses a backend by device. No operation falls back to another backend. `layout`
has the arguments of kernels and the order of sums, and `rows` the formats of stored rows.
"""

from hotbed.ops.backend import Backend, BackendName, host_backend, launches, select
from hotbed.ops.layout import BagLayout, CacheTags, Groups, Occurrences, Rows, RuleStep

__all__ = [
    "Backend",
    "BackendName",
    "BagLayout",
    "CacheTags",
    "Groups",
    "Occurrences",
    "Rows",
    "RuleStep",
    "host_backend",
    "launches",
    "select",
]

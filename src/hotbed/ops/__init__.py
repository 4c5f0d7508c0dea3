"""Run the operations on rows: one signature, three backends.

``reference.py`` is plain PyTorch, the definition and the oracle of every test; ``cpu_*.py`` are Numba, ``triton_*.py``
are Triton. `select` picks one by device; nothing ever falls back to another silently.
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

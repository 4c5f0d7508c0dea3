"""What must be set before any test module is imported."""

import os
from collections.abc import Iterator

# Several test processes share the cores; OpenMP's idle threads would spin against them. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings

from .matrix import FEWER_EXAMPLES
from .ranks import Ranks

if not torch.cuda.is_available():
    # Read when triton is first imported: without a GPU its kernels run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

# Times differ tenfold between machines and with cold caches; no test depends on them.
quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=FEWER_EXAMPLES)
settings.register_profile("quick", quick)
settings.register_profile("full", quick, max_examples=100)  # make test-all
settings.load_profile("quick")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes joined by Gloo, a pool for each of pytest's workers."""
    pool = Ranks()
    yield pool
    pool.close()

"""What must be set before any test module is imported."""

import os

# Several test processes share the cores; OpenMP's idle threads would spin against them. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Read when triton is first imported: without a GPU its kernels run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

# Times differ tenfold between machines and with cold caches; no test depends on them.
settings.register_profile("hotbed", deadline=None)
settings.load_profile("hotbed")

"""Compile the Triton kernels of TorchRec's TritonTBE as ours are, from files that somebody has put into a folder.

They are ``triton_table_batched_embeddings.py`` and ``triton_tbe_backward_utils.py`` of
``torchrec/distributed/triton_tbe``; this repository has none of their code. What they import and is not in the folder,
FBGEMM among it, is stood in for: only kernels are compiled, nothing runs. Kernels get their arguments by name, with
the types that TorchRec's tensors have, and the constants of its configuration for an H100 (``BUFFER_SIZE`` 2, one
warp, runs of 256 and more are long), for one table of each dim, one id per bag and float32 throughout.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from .line import GOALS, Line, line_of
from .pretend import Compiled, compiling

DIMS = (16, 64, 128)
TABLES, BATCH, LONG = 26, 4096, 256
MAIN, UTILS = "triton_table_batched_embeddings", "triton_tbe_backward_utils"
PACKAGE = "torchrec.distributed.triton_tbe"
FORWARD, SHORT = "table_batched_embedding_bag_forward_unweighted_kernel", "triton_tbe_backward_short_run_unweighted"
KERNELS = {
    FORWARD: (MAIN, "lookup", 2),
    SHORT: (MAIN, "short runs", 1),
    "triton_tbe_backward_long_run_grad_accum_unweighted": (MAIN, "long runs, sums", 1),
    "triton_tbe_backward_long_run_apply_unweighted": (MAIN, "long runs, rule", 0),
    "_classify_runs_kernel": (UTILS, "short or long", 0),
    "_expand_long_runs_kernel": (UTILS, "cut long runs", 0),
}
"""File of a kernel, what it is called in the table, and loops that its path is in."""


def lines(folder: Path, target: str, say: Callable[[Line], None]) -> list[Line]:
    """Compile their kernels for a target, for rows of `DIMS` columns."""
    found: list[Line] = []
    with _modules(folder) as modules:
        for dim in DIMS:
            for name, (module, title, depth) in KERNELS.items():
                kernel = getattr(modules[module], name)

                def keep(compiled: Compiled, title: str = title, depth: int = depth, dim: int = dim) -> None:
                    found.append(_line(compiled, title, depth, dim))
                    say(found[-1])

                values = arguments(dim)
                missing = [argument for argument in kernel.arg_names if argument not in values]
                if missing:
                    raise SystemExit(f"{name}: no value is known for its arguments {', '.join(missing)}")
                with compiling(target, keep):
                    kernel[(BATCH,)](**{argument: values[argument] for argument in kernel.arg_names}, num_warps=1)
    return found


def _line(compiled: Compiled, title: str, depth: int, dim: int) -> Line:
    """Lookups read a row for each bag; a short run of one reads its row and a gradient."""
    read = {"lookup": 4 * dim, "short runs": 8 * dim}.get(title, 0)
    goal = GOALS["lookup" if title == "lookup" else "runs"]
    return line_of(
        compiled, title, f"{dim} fp32", depth=depth, tile=1, read_bytes=read, written_bytes=4 * dim, goal=goal
    )


def arguments(dim: int) -> dict[str, Any]:
    """Values of all arguments of their kernels, by name; tensors are small, for nothing runs."""
    few, many = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int64)
    floats = torch.zeros(64)
    int32 = (
        *("infos_sorted", "sorted_linear_indices_cumulative_run_lengths", "sorted_linear_indices_num_runs"),
        *("short_run_ids", "long_run_program_seg_starts", "long_run_program_seg_ends", "long_run_grad_buffer_ids"),
        *("num_long_run_programs", "long_run_original_ids", "num_long_runs", "cum_lengths", "num_runs", "num_short"),
        *("long_run_ids", "num_long", "seg_starts_out", "seg_ends_out", "grad_buffer_ids_out"),
        *("programs_per_long_run_out", "num_programs_out", "B_offsets", "feature_bucket_id"),
    )
    int64 = (
        *("indices", "offsets", "table_offsets", "embedding_dims", "embedding_offsets", "feature_table_map"),
        *("hash_size_cumsum", "rows_cumsum", "sorted_linear_indices_run", "bounds_check_warning"),
        *("row_output_offsets", "bucket_base"),
    )
    float32 = ("output", "weight", "dout", "momentum", "temp_grad_buffer")
    return {
        **{f"{name}_ptr": few for name in int32},
        **{f"{name}_ptr": many for name in int64},
        **{f"{name}_ptr": floats for name in float32},
        "total_embedding_dim": TABLES * dim,
        "B": BATCH,
        "T": TABLES,
        "BLOCK_SIZE": max(dim, 16),
        "vbe": False,
        "FEATURE_START": 0,
        "FEATURE_END": TABLES,
        "BAGS_PER_PROGRAM": 1,
        "UNROLL8": False,
        "FUSED_BOUNDS_CHECK": False,
        "learning_rate": 0.01,
        "eps": 0.1,
        "optimizer": 1,
        "BUFFER_SIZE": 2,
        "info_B_num_bits": 26,
        "info_B_mask": (1 << 26) - 1,
        "USE_CLC": False,
        "STOCHASTIC_ROUNDING": False,
        "stochastic_rounding_seed": 0,
        "threshold": LONG,
        "CLASSIFY_BLOCK": 1024,
        "NUM_BUCKETS": 1,
    }


@contextmanager
def _modules(folder: Path) -> Generator[dict[str, ModuleType]]:
    """Load their files, and stand in for what they import and is not here."""
    absent = [
        *("fbgemm_gpu", "fbgemm_gpu.config", "fbgemm_gpu.split_embedding_configs"),
        *("fbgemm_gpu.split_table_batched_embeddings_ops_common", "torchrec", "torchrec.distributed", PACKAGE),
        *("fbgemm_gpu.split_table_batched_embeddings_ops_training_common", f"{PACKAGE}.triton_tbe_backward_config"),
        *(f"{PACKAGE}.triton_tbe_backward_long_run_fused", "ads_mkl", "ads_mkl.ops", "ads_mkl.ops.triton"),
        *("ads_mkl.ops.triton.amd", "ads_mkl.ops.triton.amd.triton_table_batched_embeddings"),
    ]
    found: dict[str, ModuleType] = {}
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in absent}):
        for name in (UTILS, MAIN):
            file = folder / f"{name}.py"
            if not file.is_file():
                raise SystemExit(f"{file} is not there: put the files of TorchRec's {PACKAGE} into {folder}")
            spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", file)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            found[name] = module
        yield found

"""Write the census of some cases as JSON: ``python -m tests.census OUT SELECTION``, with ``RANK`` for several ranks.

A process of its own, for PyTorch cannot be told again that there is no CUDA device.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.census.guard import load_guard


def main(out: Path, selection: str) -> None:
    """Run the cases of a selection."""
    load_guard(out.parent)
    import torch

    from tests.census.cases import CASES

    torch.set_num_threads(1)
    rank, cases = int(os.environ.get("RANK", "0")), CASES[selection]
    ranks = cases[0].ranks
    if ranks > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{out.parent / 'store'}", rank=rank, world_size=ranks)
    from tests.census.device import pretend

    pretend()
    from tests.census.triton_kernels import replace_kernels

    replace_kernels()
    from tests.census.captured import captured, compared_as_on_a_gpu, faults
    from tests.census.exchanges import ORDER, replace_exchanges
    from tests.census.steps import census, stopped

    if ranks > 1:
        replace_exchanges()
    if selection.startswith("captured"):
        found: dict[str, Any] = captured(cases)
    elif selection == "replay":
        found = compared_as_on_a_gpu()
    elif selection == "faults":
        found = faults(cases[0])
    else:
        found = {case.name: census(case, rank, ORDER).plain() for case in cases}
    if selection == "usual":
        found["stopped"] = [stopped(cases[0], good) for good in (0, 2)]
    if selection == "two ranks":
        found["stopped"] = stopped(cases[0], 2, rank)
    out.write_text(json.dumps(found, indent=1))
    sys.stdout.flush()
    os._exit(0)  # the pretended device has no memory that could be freed


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

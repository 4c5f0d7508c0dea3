"""Find the built-in hardware profile of this machine, for plans that nobody has named hardware for."""

from __future__ import annotations

import os

import torch

from hotbed.errors import PlanError
from hotbed.machine import usable_cores
from hotbed.plan.hardware import Hardware, profiles

GPUS = {"A100": "a100-80", "H100": "h100", "H200": "h200", "B200": "b200"}
"""Profiles by what is in a GPU's name; A100s have 40 or 80 GB."""
CPU = "epyc-7742x2"


def hardware_here(device: torch.device) -> Hardware:
    """Return the profile of this machine's GPUs; of a CPU a server's, with the memory and cores that are here.

    Raises
    ------
    PlanError
        If there is no profile of this GPU.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = next((profile for name, profile in GPUS.items() if name in properties.name), None)
        if found is None:
            raise PlanError(
                f"there is no hardware profile of {properties.name}; measure it with `hotbed doctor --measure FILE` "
                f"and set parallel.hardware to FILE, or to one of {', '.join(profiles())}"
            )
        return Hardware.load(found).with_(device_bytes=properties.total_memory, ranks_per_node=ranks)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = usable_cores()
    return Hardware.load(CPU).with_(device_bytes=memory, host_bytes=memory, cores_per_node=cores, ranks_per_node=ranks)

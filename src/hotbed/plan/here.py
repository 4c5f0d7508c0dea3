"""Find the built-in hardware profile of this machine, for plans that nobody has named hardware for."""

from __future__ import annotations

import os
import shutil
import tempfile

import torch

from hotbed.errors import PlanError
from hotbed.machine import memory_bytes, usable_cores
from hotbed.plan.hardware import Hardware, profiles

GPUS = {"A100": "a100-80", "H100": "h100", "H200": "h200", "B200": "b200"}
"""Profiles by what is in a GPU's name; A100s have 40 or 80 GB."""
CPU = "epyc-7742x2"


def hardware_here(device: torch.device) -> Hardware:
    """Return the profile of this machine's GPUs; of a CPU a server's, with the memory and cores that are here."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = next((profile for name, profile in GPUS.items() if name in properties.name), None)
        if found is None:
            raise PlanError(
                f"there is no hardware profile of {properties.name}; measure it with `hotbed doctor --measure FILE` "
                f"and set parallel.hardware to FILE, or to one of {', '.join(profiles())}"
            )
        profile = Hardware.load(found).with_(device_bytes=properties.total_memory)
        # Rates of the node's own memory and disks stay the profile's; how much there is of them is what is here.
        return _of_ranks(profile, ranks).with_(host_bytes=memory_bytes(), disk_bytes=_free_disk())
    memory, cores = memory_bytes(), usable_cores()
    profile = Hardware.load(CPU)
    share = min(cores / profile.cores_per_node, 1.0)  # of what all cores of the profile read, multiply and sum
    for figure in ("gather", "scatter", "flops"):
        profile = profile.scaled(figure, share)
    profile = _of_ranks(profile, ranks).with_(device_bytes=memory, host_bytes=memory, cores_per_node=cores)
    return profile.with_(disk_bytes=_free_disk() if profile.disk_read else 0)


def _of_ranks(profile: Hardware, ranks: int) -> Hardware:
    """The profile with so many ranks on a node, which share its network cards."""
    return profile.with_(ranks_per_node=ranks, network=profile.network * profile.ranks_per_node / ranks)


def _free_disk() -> int:
    """Bytes that are free where temporary files are."""
    return shutil.disk_usage(tempfile.gettempdir()).free

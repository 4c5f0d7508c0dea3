"""Measure a machine for the planner: ``hotbed doctor --measure FILE`` writes a hardware profile.

`machine_profile` runs the measurements, and times memory, kernels and the disk. `rank_exchanges` times exchanges
between processes. `step_overheads` times small training steps.
"""

"""Measure a machine for the planner: ``hotbed doctor --measure FILE`` writes a hardware profile.

`machine_profile` is the program. It moves rows with hotbed's kernels (`kernel_times`), reads a disk (`disk_reads`),
exchanges tensors between processes (`rank_exchanges`), and runs small training steps (`step_overheads`, `step_jobs`).
"""

"""Runs that are killed, starved of disk or cut off, at counted points of every phase.

Promise: a command that is killed at any moment resumes from the last published checkpoint and ends with the same bits.

A process that has imported everything (``zygote.py``) is forked for each command of ``workloads.py``, so a try takes
about a second. In the child, operations are counted by phase (``points.py``): training, exchanges, averages of
replicas, full and differential checkpoints, publication, loading, write-back and evictions of tiers, preparation,
compaction and export. An undisturbed run gives the counts. A point is drawn uniformly from the operations of a phase.
The process records phase, operation and number in a file, syncs it, and ends with SIGKILL before or after the
operation. Then every byte of every published checkpoint is read, the same command runs to its end, and its output is
compared with the output of the undisturbed run. A run that finishes before its point does not count. Other ranks must
end without a traceback.

A full disk is an ENOSPC at the n-th write of a kind of file and at all later writes (``wants.py``). ``exchanges.py``
kills, stops or delays a rank in each kind of exchange. ``python -m benchmarks.chaos --json FILE`` runs campaigns over
all phases, resumes a stopped campaign, and exits with 1 if anything was lost. ``python -m benchmarks.soak`` trains
for an hour and checks that memory, open files, threads and disk stay flat.
"""

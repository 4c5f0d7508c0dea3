"""hotbed against FBGEMM, TorchRec and plain PyTorch on the CPU of this machine, on the same ids.

    make bench-peers                                   # the whole comparison, into benchmarks/results/peers_cpu.json
    benchmarks/peers/.venv/bin/python -m benchmarks.peers --help

*What is measured.* ``embedding``, ``multi_hot`` and ``narrow``: lookup of 26 tables, backward from a given gradient,
update with row-wise AdaGrad (plain PyTorch: SGD). ``step``: a whole training step of the DLRM that NVIDIA published.
``world2``, ``world2_uniform`` and ``world2_step``: the same in two processes that have half of the batch each, tables
sharded over them table-, row- and column-wise, exchanges included; hotbed against TorchRec. ``numerics``: whether
outputs, rows and moments of hotbed and FBGEMM agree, for every optimizer that FBGEMM has on the CPU; and those of
hotbed and TorchRec in two processes.

*How.* Every side runs in a process of its own, because two sets of tables do not fit into memory; processes take
turns, round after round, on ids drawn once. A worker builds its tables, warms up, times every step on a batch it has
not seen and reports the median step. Where a side is two processes, they start every step together, and a step took as
long as the slower of them. A ratio is (peer seconds ÷ hotbed seconds) of one round; more than 1 means hotbed is faster.

*What is fair.* Inputs are made before the clock starts, as each library wants them, and are new objects in every step,
so that nobody profits from what it remembered about a batch. hotbed and FBGEMM check ids against table sizes inside
the clock, as they do by default. The result of a lookup is freed inside the clock, for a training step frees it too.

*What spoils it.* Other processes: OpenMP's threads wait for each other, so one busy core can multiply a time. Every
worker reports how long its threads waited for a core (``cpu_wait_share``). Where that is over a tenth of the time it is
run again, up to three times, whichever side it is; the largest share that remains is printed. The threads of two
processes that exchange are more than two cores can run and wait for each other; for them what other processes used
counts (``others_share``).
"""

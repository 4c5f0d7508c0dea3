"""Compare hotbed with FBGEMM, TorchRec and plain PyTorch on the CPU of this machine, on the same ids.

    make bench-peers                                   # the whole comparison, into benchmarks/results/peers_cpu.json
    benchmarks/peers/.venv/bin/python -m benchmarks.peers --help

*What is measured.* ``numerics``: whether outputs, rows and moments of hotbed and FBGEMM agree, for every optimizer of
FBGEMM on the CPU. ``embedding``, ``multi_hot`` and ``narrow``: lookup of all tables, backward
from a given gradient, and update with row-wise AdaGrad (plain PyTorch: SGD). ``step``: a training step of the DLRM that
NVIDIA published. ``world2``, ``world2_uniform`` and ``world2_step``: the same in two processes with half of the batch
each, with tables sharded table-, row- and column-wise, for hotbed and TorchRec.

*How.* Each side runs in a process of its own, because two sets of tables do not fit into memory. Processes take turns,
round after round, on the same ids. A worker builds its tables, warms up, times every step on a new batch, and reports
the median step. Two processes of one side start every step together, and a step takes as long as the slower of them.
A ratio is peer seconds ÷ hotbed seconds of one round: more than 1 means that hotbed is faster. Ratios have ``_min`` and
``_max`` over rounds.

*What is fair.* Inputs are made before the clock starts, as each library wants them, and are new objects in each step.
hotbed and FBGEMM check ids inside the clock, as they do by default. The result of a lookup is freed inside the clock.
FBGEMM's CPU wheel has no OpenMP, so it is also compared with hotbed on one thread (``_one_thread``), and with huge
pages, which hotbed always requests (``_hugepages``). ``_fp32`` is hotbed as recommended (bf16 autocast) against the
peer as installed, ``_fp32_like_for_like`` and ``_bf16`` have equal precisions. ``column`` is hotbed's exact row-wise
AdaGrad with one moment per row, ``column_apart`` has one per row and shard like TorchRec. ``hotbed_alone`` has all
tables on each rank and exchanges nothing, and ``sharding_share`` is 1 − its seconds ÷ the seconds of a scheme.

*What spoils it.* Other processes: OpenMP's threads wait for each other, so one busy core can multiply a time. A worker
reports how long its threads waited for a core (``cpu_wait_share``), and is run again, up to three times, if this is
more than a tenth of the time. For two processes, the time of other processes counts (``others_share``).
"""

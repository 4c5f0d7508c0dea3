"""Measure kernels and training steps against limits of this machine: ``python -m benchmarks.kernels ops | step``.

``ops.py`` measures kernel by kernel, ``step.py`` whole training steps of a DLRM; both draw their ids and count bytes
with ``workload.py``, and ``meter.py`` times them in turn with what they cannot beat, ``limits.py``. ``--json`` writes
(times in seconds; each as ``median_s``, ``min_s`` and ``max_s`` over the repeats)::

    command       "ops" or "step"
    environment   hardware, device, threads; versions
    settings      every option, by name

    ops
    copy_gb_s     rate of a streaming copy, bytes read and written
    kernels       a list, one entry per kernel and kind of ids: kernel, ids, distinct_rows, bytes that must move, gb_s,
                  limit (what it cannot beat: "gather", "scatter" or "copy") with limit_s, and min_, median_ and
                  max_share: limit's seconds ÷ the kernel's, repeat by repeat; share_of_copy
    dtypes        the same for lookup and update with Zipf ids, of rows of each dtype
    dtypes_left_out  why a dtype is not among them, by dtype

    step
    step          samples_per_s; seconds
    parts         a list; part (see ``step.py``) with seconds
    roofline      what a step cannot beat: matmul_s, gather_s, scatter_s; the sum of these ÷ the step's seconds
"""

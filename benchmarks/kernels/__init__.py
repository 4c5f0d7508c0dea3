"""Measure kernels and training steps against limits of this machine: ``python -m benchmarks.kernels ops | step``.

``ops.py`` measures each kernel, and ``step.py`` training steps of a DLRM. ``workload.py`` draws ids and counts bytes.
``meter.py`` times calls in turn with their limits, which are in ``limits.py``. ``--json`` has all options under
``settings``, and seconds as ``median_s``, ``min_s`` and ``max_s`` over the repeats:

    ops    copy_gb_s (a streaming copy, bytes read and written), kernels: a list with kernel, ids, distinct_rows, bytes
           that must move, gb_s, limit ("gather", "scatter" or "copy"), limit_s, shares (seconds of the limit ÷ those of
           the kernel, repeat by repeat), share_of_copy; dtypes: the same for lookup and update of rows of each dtype
    step   step, parts (see ``step.py``), roofline: matmul_s, gather_s, scatter_s; their sum ÷ the seconds of the step
"""

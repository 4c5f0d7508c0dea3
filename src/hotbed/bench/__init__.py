"""Measure how fast kernels and training steps are here, and how fast they could be: ``hotbed bench``.

``run.py`` is the command over ``options.py``. ``ops.py`` measures kernel by kernel, ``step.py`` whole training steps of
a DLRM; both draw their ids and count bytes with ``workload.py``, and ``meter.py`` times them in turn with what they
cannot beat, ``limits.py``. What ``--json`` writes
(times in seconds; of every time there are ``median_s``, ``min_s`` and ``max_s`` over the repeats)::

    command       "bench ops" or "bench step"
    environment   hardware, device, threads; versions of hotbed, torch, numba, triton (null where there is none)
    settings      every option, by name

    bench ops
    copy_gb_s     rate of a streaming copy, bytes read and written
    kernels       a list, one entry per kernel and kind of ids:
      kernel            its name, see `hotbed.ops.backend.Backend`
      ids               "uniform" or "zipf"; null where ids do not matter
      distinct_rows     distinct rows of the batch; null where ids do not matter
      bytes             that must move, see `hotbed.bench.workload`
      median_s, min_s, max_s
      gb_s              bytes ÷ median_s ÷ 10⁹
      limit             what it cannot beat: "gather", "scatter" or "copy", see `hotbed.bench.limits`
      limit_s           median seconds of that limit
      median_share, min_share, max_share
                        limit's seconds ÷ the kernel's, repeat by repeat
      share_of_copy     gb_s ÷ copy_gb_s
    dtypes        a list, for lookup and update with Zipf ids, of rows of each dtype: ``dtype`` and what ``kernels``
                  have; a limit moves rows of that dtype, so it is smaller where rows are
    dtypes_left_out
                  why a dtype is not among them, by dtype: it does not fit into memory, or into words of 32 bits

    bench step
    step          samples_per_s; median_s, min_s, max_s
    parts         a list; part (see `hotbed.bench.step`) with median_s, min_s, max_s
    roofline      what a step cannot beat:
      matmul_s          all matrix products, forward and backward
      gather_s, scatter_s
                        rows read, rows updated, at the speed of the limits
      median_share, min_share, max_share
                        the sum of these ÷ the step's seconds, repeat by repeat
"""

"""How do servers score requests with models that training exported and keeps publishing?

`server` runs the process, and `app` answers HTTP. `requests` and `request_tensors` read bodies, `batching` collects
rows of requests, and `scorer` computes scores. `model_files` defines exported models and changes. `served_model` and
`follower` load new versions. `served_tables`, `row_files` and `redis_records` look rows up. `options` defines
the options of ``hotbed serve``, and `monitoring` has metrics and logs.
"""

"""Answer requests with trained models: what training exports, and what servers read, follow and compute.

`model_files` describes and reads exported models and sets of changes, which `hotbed.train.runs.model_export` writes.
`scorer`
computes scores, also for ``hotbed predict``.
"""

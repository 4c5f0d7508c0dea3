"""Answer requests with trained models: what training exports, and what servers read, follow and compute.

`format` says what an exported model and a set of changes are, `writing` makes them of checkpoints. `scorer` computes
scores, for ``hotbed predict`` too.
"""

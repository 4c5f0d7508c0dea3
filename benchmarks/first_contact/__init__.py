"""First contact: what unedited ``hotbed init`` and ``hotbed train`` reach on data that nobody prepared for them.

    python -m benchmarks.first_contact --trials 30 --seeds 3 --json benchmarks/results/first_contact.json

Six planted logs, whose attainable AUC is known, and the real log twice, against hashed logistic regression and a plain
PyTorch DLRM, whose settings are searched on the same validation split.
"""

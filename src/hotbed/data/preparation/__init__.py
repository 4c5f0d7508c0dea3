"""Convert raw logs or tables to a dataset of ids: `hotbed prepare`.

Stages in order: `raw_inputs` (read), `counting` (count and merge), `encoded_rows` (encode). `prepare_dataset` runs them.
"""

"""Convert raw logs or tables to a dataset of ids: `hotbed prepare`.

`prepare_dataset` runs the stages: `raw_inputs` (read), `counting` (count and merge), `encoded_rows` (encode).
"""

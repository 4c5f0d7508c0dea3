"""Which sources can training read?

Parquet, NVIDIA split-binary files, NumPy arrays, and generated rows.
"""

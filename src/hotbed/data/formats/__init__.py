"""Sources that training reads: Parquet, NVIDIA split-binary files, NumPy arrays and generated samples."""

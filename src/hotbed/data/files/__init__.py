"""Find and read files of rows (Parquet, CSV, TSV and Criteo logs), and split rows by time, hash or order."""

"""Which files hold rows, and how are their rows read?

Parquet folders and URIs, CSV and TSV files, Criteo logs, and the splits of their rows by time, hash or order.
"""

"""Measure how often each row of a table is used, and split samples into hot and cold batches."""

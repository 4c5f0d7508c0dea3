"""How often is each row of a table used?

Popularity, LRU hit rates, and the split of samples into hot and cold batches.
"""

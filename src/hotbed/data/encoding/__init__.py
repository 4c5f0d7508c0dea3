"""How do the values of a row become a batch?

Training, prediction and serving encode rows here, so all three see the same ids and numbers.
"""

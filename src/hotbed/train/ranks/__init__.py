"""How do the ranks of a run start, exchange values, and distribute the samples of a batch?"""

"""How do the ranks of a run start, agree, and share batches?"""

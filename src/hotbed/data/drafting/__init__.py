"""Profile the columns of any files, and draft a schema for them.

``hotbed init`` and ``hotbed inspect`` use the same column profiles.
"""

"""How do ids become row numbers of tables?

`hotbed prepare` counts ids out of core, builds vocabularies, and writes the encoded rows.
"""

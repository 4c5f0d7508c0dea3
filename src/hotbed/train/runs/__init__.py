"""How does a recipe become a run?

`run` is the sequence of steps; the other files build, resume, plan, report and publish.
"""

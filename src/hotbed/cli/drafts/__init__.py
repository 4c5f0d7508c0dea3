"""Draft a recipe for a dataset: `hotbed init`."""

"""Runs that are killed, starved of disk or cut off, at counted points of every phase."""

"""Simulate training steps of a plan on any hardware."""

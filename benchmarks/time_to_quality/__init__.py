"""Measure how long hotbed and other systems train on CPUs until the test logloss reaches a target."""

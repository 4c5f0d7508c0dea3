"""Seconds of training until the test logloss is as low as a target, of hotbed and of what else trains on CPUs."""

"""Compare the figures and claims of publications with measured, simulated and tested ones of hotbed."""

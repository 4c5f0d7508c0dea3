"""Set every figure and claim of the sources beside what is measured, simulated or tested here."""

"""Which recipe does `hotbed init` draft for a data set?"""

"""Which recipe does `hotbed init` draft for a dataset?"""

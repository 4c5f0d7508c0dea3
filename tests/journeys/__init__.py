"""Commands of the pages, run from end to end and compared with recorded results."""

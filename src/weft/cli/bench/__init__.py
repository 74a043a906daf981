"""`weft bench`: sparse all-reduce beside what PyTorch does today, and beside the bound.

`cases` draws the data and knows the right answer, `measure` is one rank's program and those that
are measured, `command` the options and the table.
"""

"""`weft plan`: what a sparse all-reduce would take on a cluster that need not be here.

`predict` says what so many ranks would bring and what the rule takes, `plot` draws that, and
`command` is the command line.
"""

"""Faces of other libraries: their names and their argument order, over weft's own calls.

No algorithm lives here. A program that was written for one of these libraries keeps its calls;
a new one is better served by `weft.sparse_all_reduce`.
"""

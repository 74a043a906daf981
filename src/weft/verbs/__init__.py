"""Tensors that weft's wire does not carry: four verbs, of a process group of torch's or by posts.

The question who carries a tensor is asked here, and nowhere else (`carrier`).
"""

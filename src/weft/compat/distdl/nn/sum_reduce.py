"""`distdl.nn.sum_reduce`."""

from .layers import SumReduce as SumReduce

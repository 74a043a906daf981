"""`distdl.nn.all_sum_reduce`."""

from .layers import AllSumReduce as AllSumReduce

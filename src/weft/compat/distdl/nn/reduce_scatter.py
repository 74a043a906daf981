"""`distdl.nn.reduce_scatter`."""

from .layers import ReduceScatter as ReduceScatter

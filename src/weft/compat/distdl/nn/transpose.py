"""`distdl.nn.transpose`: the older name of `Repartition`."""

from .layers import Repartition

DistributedTranspose = Repartition
"""DistDL's older name of `Repartition`."""

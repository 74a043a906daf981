"""`distdl.nn.repartition`."""

from .layers import Repartition as Repartition

"""`distdl.nn.all_gather`."""

from .layers import AllGather as AllGather

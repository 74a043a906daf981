"""`distdl.nn.broadcast`."""

from .layers import Broadcast as Broadcast

"""`distdl.nn.halo_exchange`."""

from .halo import HaloExchange as HaloExchange

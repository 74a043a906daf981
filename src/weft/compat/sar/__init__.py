"""SAR's communication routines, under their names and with their arguments.

SAR (Mostafa, "Sequential Aggregation and Rematerialization: Distributed Full-batch Training of
Graph Neural Networks on Large Graphs", MLSys 2022) trains graph networks over `all_to_all` and
`all_reduce` alone. A program that calls its communication routines runs over weft with

```python
import weft.compat.sar as sar
```

on every backend, gloo included. Its graph classes are not here.

The source is SAR's guide to its communication routines.
"""

from . import comm
from .comm import (
    Config,
    SocketInfo,
    all_reduce,
    all_to_all,
    all_to_all_rounds,
    backend,
    comm_device,
    dump_ip_address,
    exchange_single_tensor,
    exchange_tensors,
    gather_grads,
    get_ip_address,
    get_socket,
    initialize_comms,
    is_initialized,
    master_ip,
    master_port,
    nfs_ip_init,
    rank,
    sync_params,
    world_size,
)

__all__ = [
    "Config",
    "SocketInfo",
    "all_reduce",
    "all_to_all",
    "all_to_all_rounds",
    "backend",
    "comm",
    "comm_device",
    "dump_ip_address",
    "exchange_single_tensor",
    "exchange_tensors",
    "gather_grads",
    "get_ip_address",
    "get_socket",
    "initialize_comms",
    "is_initialized",
    "master_ip",
    "master_port",
    "nfs_ip_init",
    "rank",
    "sync_params",
    "world_size",
]

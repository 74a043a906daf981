"""SAR's module `comm`, under whose name its programs call these."""

from .collective import (
    all_reduce,
    all_to_all,
    all_to_all_rounds,
    exchange_single_tensor,
    exchange_tensors,
    gather_grads,
    sync_params,
)
from .start import (
    SocketInfo,
    backend,
    comm_device,
    dump_ip_address,
    get_ip_address,
    get_socket,
    initialize_comms,
    is_initialized,
    master_ip,
    master_port,
    nfs_ip_init,
    rank,
    world_size,
)

__all__ = [
    "SocketInfo",
    "all_reduce",
    "all_to_all",
    "all_to_all_rounds",
    "backend",
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

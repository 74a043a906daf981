"""A rank of the tests over MPI: started once by mpirun, it runs one body after another.

    mpirun -n 4 python mpi_ranks.py ADDRESS AUTHKEY

`conftest.py` listens at ADDRESS. It sends a rank what to run and hears how it ended; a
rank that has nothing to do sleeps on its socket.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist

from weft.bootstrap.outcome import Outcome
from weft.group import default
from weft.group.joining import connect
from weft.rendezvous import mpi
from weft.testing.pool import load_module


def run(job: dict[str, Any], store: dist.Store, rank: int) -> Outcome:
    """One body on a group of its own."""
    group = None
    try:
        module, file, name = job["body"]
        body = getattr(load_module(module, file), name)
        # the limit is of waits: on a busy machine ranks may take longer to meet
        group = connect(store, rank, job["size"], 60.0, name=job["name"], wire="mpi")
        group.set_timeout(job["timeout"])
        default.set(group)
        return Outcome(rank, body(group, *job["args"], **job["kwargs"]))
    except BaseException as error:
        if group is not None:
            group.abort(f"{type(error).__name__}: {error}")
        return Outcome(rank, error=error, trace=traceback.format_exc())
    finally:
        if group is not None:
            group.close()


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    rank = mpi.start_mpi(60.0).rank
    host, port = sys.argv[1].rsplit(":", 1)
    with Client((host, int(port)), authkey=bytes.fromhex(sys.argv[2])) as parent:
        parent.send(rank)
        store = dist.TCPStore(
            "127.0.0.1", parent.recv(), is_master=False, timeout=timedelta(seconds=60)
        )
        while (job := parent.recv()) is not None:
            parent.send(run(job, store, rank))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()

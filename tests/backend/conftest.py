"""Ranks under one mpirun, for all tests over MPI: starting them takes longer than most tests."""

from __future__ import annotations

import itertools
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from weft.base.pace import patient
from weft.bootstrap.outcome import Outcome, results

SIZE = 4  # more would prove nothing of MPI, and each takes seconds to start
START = 55.0  # seconds

Ranks = Callable[..., list[Any]]


def started(
    mpirun: Callable[..., subprocess.Popen[Any]],
) -> tuple[subprocess.Popen[Any], dict[int, Connection]]:
    """The job, and what leads to each of its ranks.

    Raises:
        TimeoutError: they did not all start.
    """
    key = secrets.token_bytes(16)
    with Listener(("127.0.0.1", 0), backlog=SIZE, authkey=key) as listener:
        listener._listener._socket.settimeout(patient(START))  # there is no public way
        host, port = listener.address
        script = str(Path(__file__).with_name("mpi_ranks.py"))
        job = mpirun(SIZE, script, f"{host}:{port}", key.hex())
        ranks = {}
        try:
            for _ in range(SIZE):
                connection = listener.accept()
                ranks[connection.recv()] = connection
        except BaseException:
            ended(job, 0.0)
            raise
    return job, ranks


def ended(job: subprocess.Popen[Any], seconds: float) -> None:
    try:
        job.wait(seconds)
    except subprocess.TimeoutExpired:
        job.terminate()
        job.wait(10)


@pytest.fixture(scope="session")
def mpi_job(mpirun: Callable[..., subprocess.Popen[Any]]) -> Iterator[Ranks]:
    """`mpi_job(size, body, ...)`, the face of `weft.testing.run`, on ranks under mpirun."""
    try:
        job, ranks = started(mpirun)
    except TimeoutError:  # once more: many tests are in this
        job, ranks = started(mpirun)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START)
    )
    numbers = itertools.count()

    def run(
        size: int,
        body: Callable[..., Any],
        *args: Any,
        timeout: float = 20.0,
        limit: float = 45.0,
        **kwargs: Any,
    ) -> list[Any]:
        found = sys.modules[body.__module__]
        work = {
            "body": (found.__name__, found.__file__, body.__qualname__),
            "size": size,
            "timeout": timeout,
            "name": f"job{next(numbers)}",
            "args": args,
            "kwargs": kwargs,
        }
        for rank in range(size):
            ranks[rank].send(work)
        outcomes = []
        for rank in range(size):
            if not ranks[rank].poll(patient(limit)):
                outcomes.append(Outcome(rank, hangs="gave no answer"))
                continue
            outcomes.append(ranks[rank].recv())
        return results(outcomes, "mpi")

    try:
        for connection in ranks.values():
            connection.send(store.port)
        yield run
    finally:
        for connection in ranks.values():
            connection.send(None)
            connection.close()
        ended(job, patient(20))

"""Time plain TCP connections to the next host: what a link gives to anybody, without weft.

    tools/netlab -n 4 --rate 100mbit --delay 25 --raw -- python benchmarks/flows.py
    tools/netlab -n 4 --rate 100mbit --delay 25 --loss 0.1 --raw -- python benchmarks/flows.py \
        --flows 8 --control cubic

Each rank sends `--bytes` to the next one and receives as many, over `--flows` connections side by
side. It prints seconds of the slowest rank, each round after a second of rest, and their median
without the first round. Divide by the seconds that the bytes take on the link.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from weft.wire.address import own_address

ROUNDS = 6
AT_ONCE = 1 << 20  # bytes that are read at once


def controlled(control: str) -> socket.socket:
    """A socket with this congestion control; "": the system's."""
    sock = socket.socket()
    if control:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    return sock


def connect(flows: int, control: str) -> tuple[list[socket.socket], list[socket.socket]]:
    """Connections to the next rank, and those of the one before; collective."""
    listener = controlled(control)
    listener.bind((own_address(), 0))
    listener.listen(flows)
    ends: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
    dist.all_gather_object(ends, listener.getsockname())
    outs = [controlled(control) for _ in range(flows)]
    for sock in outs:
        sock.connect(ends[(dist.get_rank() + 1) % len(ends)])
    ins = [listener.accept()[0] for _ in range(flows)]
    listener.close()
    return outs, ins


def read(sock: socket.socket, nbytes: int) -> None:
    while nbytes > 0:
        count = len(sock.recv(min(nbytes, AT_ONCE)))
        if not count:
            raise ConnectionError("the rank before this one went away")
        nbytes -= count


def at_once(calls: list[Callable[[], None]]) -> None:
    """Make all these calls, each in a thread."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(
    flows: Annotated[int, typer.Option(help="Connections to the next rank.")] = 1,
    nbytes: Annotated[int, typer.Option("--bytes", help="That a rank sends.")] = 12_500_000,
    control: Annotated[str, typer.Option(help="Congestion control; else the system's.")] = "",
) -> None:
    """Time so many bytes to the next host."""
    dist.init_process_group("gloo")
    outs, ins = connect(flows, control)
    part = bytes(nbytes // flows)
    sends = [lambda sock=sock: sock.sendall(part) for sock in outs]
    reads = [lambda sock=sock: read(sock, len(part)) for sock in ins]
    seconds = []
    for _ in range(ROUNDS):
        time.sleep(1.0)
        dist.barrier()
        start = time.perf_counter()
        at_once([*sends, *reads])
        elapsed = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        seconds.append(float(elapsed))
    if dist.get_rank() == 0:
        rounds = " ".join(f"{each:.2f}" for each in seconds)
        print(f"{flows} flows: {rounds} s; median {statistics.median(seconds[1:]):.2f} s")
    for sock in (*outs, *ins):
        sock.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)

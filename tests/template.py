"""A Python that has imported weft, and by fork becomes the programs that tests run as processes.

For programs that must be processes of their own, from their first line to how the interpreter ends,
but need not import torch, numba and weft themselves, which takes seconds; `programs` in conftest.py
asks for them. What comes with a request on standard input, a socket: files to be the program's
output and errors, and a socket that is told its process id, and how it ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import warnings
from typing import Any

import torch
import torch.distributed

import weft  # what it is for


def next_request(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """In a fork: what its program shall be, with the files that came along. None: nobody asks."""
    running: dict[int, tuple[int, socket.socket]] = {}  # who asked, by a file to read at the end
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready is not requests:
                tell_the_end(*running.pop(ready))
                os.close(ready)
                continue
            data, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
            if not data:
                return None
            program = os.fork()
            if program == 0:
                for end, (_, asker) in running.items():
                    os.close(end)
                    asker.close()
                return json.loads(data), files
            for file in files[:2]:
                os.close(file)
            asker = socket.socket(fileno=files[2])
            tell(asker, program)
            running[os.pidfd_open(program)] = program, asker


def tell_the_end(program: int, asker: socket.socket) -> None:
    with asker:
        tell(asker, os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))


def tell(asker: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it may be gone
        asker.send(str(number).encode())


def end_with_python() -> None:
    """Have this process end before the destructors of its libraries run: torch's take 0.15 s."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


if __name__ == "__main__":  # and not where pytest looks for examples
    import weft.bootstrap.preload  # noqa: F401  # once, and not in each program

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or nobody could wait for a program
    requests = socket.socket(fileno=0)
    asked = next_request(requests)
    requests.detach()  # its number becomes that of the input
    if asked is not None:  # and end as any program does
        request, files = asked
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate([nothing, *files[:2]]):
            os.dup2(file, number)
        for file in (nothing, *files):
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environment"])
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        faulthandler.register(signal.SIGRTMAX)  # says where all threads are
        if not request["whole"]:
            end_with_python()
        sys.argv, sys.path[0] = ["-c", *request["arguments"]], ""
        if request["strict"]:
            warnings.simplefilter("error")
        source = request["source"]
        del requests, request, asked, files, file, nothing, number
        exec(compile(source, "<string>", "exec", dont_inherit=True))

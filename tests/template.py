"""A Python that has imported weft, and by fork becomes the programs that tests run as processes.

For programs that must be processes of their own, from their first line to how the interpreter ends,
but need not import torch, numba and weft themselves, which takes seconds; `programs` in conftest.py
asks for them. What comes with a request on standard input, a socket: files to be the program's
output and errors, and a socket that is told its process id, and how it ended.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import warnings

import torch
import torch.distributed

import weft  # what it is for

if __name__ == "__main__":  # and not where pytest looks for examples
    import weft.bootstrap.preload  # noqa: F401

    gc.freeze()
    request = None
    with socket.socket(fileno=0) as requests:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how the keepers below end
        while True:
            data, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
            if not data:
                break
            if os.fork() != 0:
                for file in files:
                    os.close(file)
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (program := os.fork()) == 0:
                request = json.loads(data)
                break
            with socket.socket(fileno=files[2]) as asker:  # which may be gone
                for file in files[:2]:
                    os.close(file)
                asker.send(str(program).encode())
                asker.send(str(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])).encode())
            os._exit(0)

    if request is not None:  # and end as any program does
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
        sys.argv, sys.path[0] = ["-c", *request["arguments"]], ""
        if request["strict"]:
            warnings.simplefilter("error")
        source = request["source"]
        del request, data, files, file, nothing, number, program
        exec(compile(source, "<string>", "exec"))

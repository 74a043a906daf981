"""What mpirun starts as a rank: it has `template.py` fork one, and ends as that does.

    python -I -S rank.py ADDRESS ARGUMENT...

MPI knows its ranks by their environment, which goes along, as do the output and errors. The fixture
`mpirun` listens at ADDRESS. Nothing is imported here that takes time.
"""

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tests:
    answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tests.connect("\0" + sys.argv[1])
    asked = json.dumps({"arguments": sys.argv[2:], "environment": dict(os.environ)})
    socket.send_fds(tests, [asked.encode()], [1, 2, theirs.fileno()])
    theirs.close()
    program = int(answers.recv(100))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(program, signal.SIGKILL))
    sys.exit(int(answers.recv(100)) % 256)

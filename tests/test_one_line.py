"""`tools/one-line`, behind which `make` installs: one line of what says hundreds."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools/one-line"
TALKS = "import time\nfor n in range(200): print('line', n, 'x' * 300)\ntime.sleep(0.5)"


def one_line(code, **options):
    command = [sys.executable, TOOL, sys.executable, "-c", code]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, **options)


def test_without_a_terminal_one_line_is_left():
    done = one_line("print('one\\n' * 200)")
    assert done.returncode == 0
    assert re.fullmatch(r" +\d+ s  .*python\S* -c .*\n", done.stdout), done.stdout


def test_what_fails_is_shown_whole_with_its_status():
    done = one_line("import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)")
    assert done.returncode == 3
    assert {"a", "b"} <= set(done.stdout.splitlines())
    assert "failed with exit status 3: " in done.stdout.splitlines()[-1]


def test_a_terminal_has_the_newest_line_cut_to_its_width():
    near, far = pty.openpty()
    command = [sys.executable, TOOL, sys.executable, "-c", TALKS]
    environment = os.environ | {"COLUMNS": "60", "LINES": "20"}
    process = subprocess.Popen(command, stdout=far, stderr=far, env=environment)
    os.close(far)
    said = b""
    while chunk := _read(near):
        said += chunk
    assert process.wait() == 0
    pictures = [line for line in said.decode().split("\r\x1b[K") if " s  line " in line]
    assert pictures and max(map(len, pictures)) <= 59
    assert "line 199" in pictures[-1]


def _read(end):
    try:
        return os.read(end, 1 << 16)
    except OSError:  # the other end is closed
        return b""

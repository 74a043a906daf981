"""The flight recorder: the last calls of this process, written to a file when something fails.

The worker adds a call when it begins, the opening adds the arguments that ranks compare, and
`sparse.record` the figures of a sparse call. WEFT_RECORD_DIR names a folder, where each rank writes
one file of JSON: when its group breaks, when a call raises a WireError, and on SIGUSR1, unless the
program handles that signal. Each time the file is replaced. `weft doctor --merge` compares the
files of all ranks.

The name is that of the flight recorder of PyTorch's NCCL process group.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import re
import signal
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from ..base import watch
from .traffic import Traffic

_KEPT = 1000  # calls
_WRITTEN = ("group", "number", "name", "agreed", "ranks", "messages", "sent_bytes", "error")
_FOLDER = "WEFT_RECORD_DIR"

_log = logging.getLogger("weft")
_calls: deque[Call] = deque(maxlen=_KEPT)
_names: dict[str, int] = {}  # how many groups were made for groups of a name
_rank: dict[str, Any] = {}  # what the file says of this process
_lock = threading.RLock()  # held while the file is written; a signal handler may write, too


class Call:
    """One call of this rank on one group.

    Attributes:
        group: the name of the group.
        number: of the call on this rank and group, as in errors; 0: this is where they join.
        name: of the call.
        agreed: its number among the calls of these ranks that reached the opening exchange; 0: it
            did not reach it.
        ranks: the ranks that take part, by their numbers in the job.
        fields: the values that must be equal on all of them.
        end: when it ended, by `time.perf_counter`; None: it runs.
        messages, sent_bytes: what this rank sent in it, once it has ended.
        seconds, waited: how long it took, and for how long of that this rank waited for messages,
            once it has ended.
        error: what it raised, or "".
        figures: a dataclass with more of it, or None.
    """

    agreed = 0
    messages = 0
    sent_bytes = 0
    seconds = 0.0
    waited = 0.0
    ranks: tuple[int, ...] = ()
    fields: tuple[tuple[str, str], ...] = ()
    end: float | None = None
    error = ""
    figures = cast(Any, None)

    def __init__(self, group: str, number: int, name: str, traffic: Traffic) -> None:
        self.group = group
        self.number = number
        self.name = name
        self._traffic = traffic
        # messages and bytes before the call, and when it began
        self._before = traffic.messages, traffic.bytes, time.perf_counter()
        self._waited_before = traffic.waited
        _calls.append(self)

    def spent(self) -> tuple[int, int, float]:
        """Messages and bytes that this rank sent since the call began, and seconds."""
        messages, sent, start = self._before
        return (
            self._traffic.messages - messages,
            self._traffic.bytes - sent,
            time.perf_counter() - start,
        )

    def close(self, error: str = "") -> None:
        """Note that the call has ended."""
        self.messages, self.sent_bytes, self.seconds = self.spent()
        self.waited = self._traffic.waited - self._waited_before
        self.end = self._before[2] + self.seconds
        self.error = error
        if error and not self.messages:
            self.agreed = 0  # the group was broken before


def call_elsewhere(group: str) -> Call | None:
    """The newest call of this process that runs, and is on another group; None: there is none.

    Any thread may ask.
    """
    for call in reversed(list(_calls)):
        if call.end is None and call.group != group:
            return call
    return None


def begin(rank: int, size: int, group: str) -> str:
    """Begin to record, if nobody has: this process is `rank` of `size` in its job.

    Returns:
        The name of a new group for a group of this name: with a number, if it is not the first.
    """
    if _rank.get("pid") != os.getpid():  # not begun, or by the parent that has forked this process
        _rank.update(pid=os.getpid(), host=platform.node(), started=time.time())
        is_main = threading.current_thread() is threading.main_thread()
        if _FOLDER in os.environ and is_main and _is_free(signal.SIGUSR1):
            signal.signal(signal.SIGUSR1, lambda *_: write("SIGUSR1"))
    _rank.update(rank=rank, size=size)
    number = _names.get(group, 0) + 1
    _names[group] = number
    return group if number == 1 else f"{group} ({number})"


def _is_free(number: int) -> bool:
    """Whether neither Python nor machine code, of which Python does not know, handles a signal."""
    status = Path("/proc/self/status")
    caught = re.search(r"SigCgt:\s*(\w+)", status.read_text() if status.exists() else "")
    is_caught = caught is not None and int(caught[1], 16) >> (number - 1) & 1
    return not is_caught and signal.getsignal(number) is signal.SIG_DFL


def write(why: str) -> None:
    """Write the file, if WEFT_RECORD_DIR is set; `why` is what has happened."""
    folder = os.environ.get(_FOLDER)
    clock = time.time()
    offset = clock - time.perf_counter()
    if not folder or _rank.get("pid") != os.getpid():
        return
    with _lock:
        calls = [_spelled(call, offset) for call in list(_calls)]
        record = {**_rank, "written": clock, "why": why, "at": watch.program_line(), "calls": calls}
        path = Path(folder, f"rank{_rank['rank']}.json")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".new").write_text(json.dumps(record))
            path.with_suffix(".new").replace(path)
        except OSError as error:  # the error that brought us here is more important
            _complain(_rank["rank"], folder, error.strerror)


@functools.cache  # so once
def _complain(rank: int, folder: str, why: str) -> None:
    _log.warning("rank %d cannot write its calls to %s=%s: %s", rank, _FOLDER, folder, why)


def _spelled(call: Call, offset: float) -> dict[str, Any]:
    """A call as it is written; times plus `offset` are seconds since 1970."""
    record = {name: getattr(call, name) for name in _WRITTEN}
    record["start"] = call._before[2] + offset
    record["end"] = None if call.end is None else call.end + offset
    record["fields"] = dict(call.fields)
    if call.figures is not None:
        record.update(asdict(call.figures))
    return record

"""The flight recorder: the last calls of this process, written where something fails.

A call is kept from the moment it has its turn (`worker`); what all ranks were asked is added as
they agree on it (`agree`), and the figures of a sparse call by `sparse.record`. WEFT_RECORD_DIR
names a folder: each rank writes one file of JSON there, anew each time, when its wire breaks, when
a call raises a WireError, and on SIGUSR1, unless something handles that already.
`weft doctor --merge` lines the files up.

Source: the flight recorder of PyTorch's NCCL process group, from which the name is.
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
from typing import TYPE_CHECKING, Any, cast

from .failure import watch

if TYPE_CHECKING:
    from .base import Traffic

_KEPT = 1000  # calls
_TOLD = ("group", "number", "name", "agreed", "ranks", "messages", "sent_bytes", "error")
_FOLDER = "WEFT_RECORD_DIR"

_log = logging.getLogger("weft")
_calls: deque[Call] = deque(maxlen=_KEPT)
_names: dict[str, int] = {}  # how many groups had a name
_rank: dict[str, Any] = {}  # whose calls these are
_lock = threading.RLock()  # of whoever writes: a signal may come in the middle of that


class Call:
    """One call of this rank on one wire.

    Attributes:
        group: the name of the wire.
        number: of the call on this rank and wire, as errors count.
        name: of the call.
        agreed: its number among those that the same ranks agreed on; 0: it came to no agreement.
        ranks: these ranks, by their numbers in the job.
        fields: what must be equal on all of them.
        end: of `time.perf_counter`; None before.
        messages, sent_bytes: what this rank sent in it, once it has ended.
        error: what it raised, or "".
        figures: more of it, a dataclass.
    """

    agreed = messages = sent_bytes = 0
    ranks: tuple[int, ...] = ()
    fields: tuple[tuple[str, str], ...] = ()
    end: float | None = None
    error, figures = "", cast(Any, None)

    def __init__(self, group: str, number: int, name: str, traffic: Traffic) -> None:
        self.group, self.number, self.name, self._traffic = group, number, name, traffic
        self._before = traffic.messages, traffic.bytes, time.perf_counter()
        _calls.append(self)

    def spent(self) -> tuple[int, int, float]:
        """Messages that were sent since it began, their bytes, and seconds."""
        traffic, (messages, sent, start) = self._traffic, self._before
        return traffic.messages - messages, traffic.bytes - sent, time.perf_counter() - start

    def leave_out(self, so_far: tuple[int, int, float]) -> None:
        """What was spent since `spent` gave that is not the call's own."""
        more = zip(self._before, self.spent(), so_far, strict=True)
        messages, sent, start = (before + each - had for before, each, had in more)
        self._before = int(messages), int(sent), start

    def close(self, error: str = "") -> None:
        """It has ended."""
        self.messages, self.sent_bytes, seconds = self.spent()
        self.end, self.error = self._before[2] + seconds, error
        if error and not self.messages:
            self.agreed = 0  # it came to a wire that was broken already


def begin(rank: int, size: int, group: str) -> str:
    """This is that rank of a job; what a new wire for a group of that name is called."""
    if not _rank:
        _rank.update(pid=os.getpid(), host=platform.node(), started=time.time())
        is_main = threading.current_thread() is threading.main_thread()
        if _FOLDER in os.environ and is_main and _is_free(signal.SIGUSR1):
            signal.signal(signal.SIGUSR1, lambda *_: write("SIGUSR1"))
    _rank.update(rank=rank, size=size)
    _names[group] = number = _names.get(group, 0) + 1
    return group if number == 1 else f"{group} ({number})"


def _is_free(number: int) -> bool:
    """Whether nobody handles a signal, nor does machine code, of which Python knows nothing."""
    status = Path("/proc/self/status")
    caught = re.search(r"SigCgt:\s*(\w+)", status.read_text() if status.exists() else "")
    is_caught = caught is not None and int(caught[1], 16) >> (number - 1) & 1
    return not is_caught and signal.getsignal(number) is signal.SIG_DFL


def write(why: str) -> None:
    """Write what is kept, if there is a folder for it; `why`: what has happened."""
    folder, clock, now = os.environ.get(_FOLDER), time.time(), time.perf_counter()
    if not folder or _rank.get("pid") != os.getpid():
        return
    with _lock:
        calls = [_spelled(call, clock - now) for call in list(_calls)]
        said = {**_rank, "written": clock, "why": why, "at": watch.standing(), "calls": calls}
        path = Path(folder, f"rank{_rank['rank']}.json")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".new").write_text(json.dumps(said))
            path.with_suffix(".new").replace(path)
        except OSError as error:  # what is raised counts more than what is written
            _complain(_rank["rank"], folder, error.strerror)


@functools.cache  # so once
def _complain(rank: int, folder: str, why: str) -> None:
    _log.warning("rank %d cannot write its calls to %s=%s: %s", rank, _FOLDER, folder, why)


def _spelled(call: Call, offset: float) -> dict[str, Any]:
    """A call as it is written; the offset makes times of the day of its own."""
    said = {name: getattr(call, name) for name in _TOLD}
    said.update(start=call._before[2] + offset, end=call.end and call.end + offset)
    said["fields"] = dict(call.fields)
    return said if call.figures is None else {**said, **asdict(call.figures)}

"""The limit of open files, where a wire with many peers would reach it.

A rank has several sockets to every peer, and a process may have only so many files open: 1,024 on
most machines, which is about 330 peers. That is the soft limit, which a process may raise by itself
up to its hard limit. It is raised for the whole process and stays so.
"""

from __future__ import annotations

import logging
import os

try:
    import resource
except ImportError:  # Windows: sockets are no files there
    resource = None  # type: ignore[assignment]  # the module, or that there is none

__all__ = ["make_room"]

_log = logging.getLogger("weft")
_OWN = 16  # files that a wire opens besides its connections: listener, selectors, wake-up
_SPARE = 128  # that the rest of the program may want, where the hard limit allows
_UNKNOWN = 32  # open ones, where nobody says


def make_room(connections: int) -> str | None:
    """See that so many more connections may be opened; what is in the way, or None."""
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = _opened()
    needed = opened + connections + _OWN
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return None
    if hard != resource.RLIM_INFINITY and needed > hard:
        return (
            f"{connections} connections need {needed} open files with the {opened} that are open, "
            f"and the hard limit is {hard}: raise it (ulimit -Hn {needed + _SPARE}, or LimitNOFILE "
            "of the service that starts the ranks)"
        )
    wanted = needed + _SPARE
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError) as error:  # macOS has a limit above the hard one's infinity
        return (
            f"{connections} connections need {needed} open files with the {opened} that are open, "
            f"and the limit of {soft} cannot be raised ({error}): start with ulimit -n {wanted}"
        )
    _log.info("the limit of open files is %d now, it was %d", allowed, soft)
    return None


def _opened() -> int:
    """Files that this process has open."""
    for listing in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(listing))
        except OSError:
            continue
    return _UNKNOWN

"""Training that may end before its end: by Ctrl-C, or since this machine cannot do it.

What was made until then is kept and written, and only then the person is told.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weft.errors import WireError

from .record import Run
from .settings import Refused

__all__ = ["Attempt", "refusing"]


class Attempt:
    """How the training of some runs went.

    Attributes:
        interrupted: by Ctrl-C.
        refused: why it could not go on, or None.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.refused: Refused | None = None

    @contextmanager
    def going(self) -> Iterator[None]:
        """While they are trained."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
        except Refused as refusal:
            self.refused = refusal

    def made(self, runs: Sequence[Run]) -> None:
        """Note in the runs if they were ended early.

        Raises:
            Refused, KeyboardInterrupt: what ended them, if there is nothing to keep.
        """
        early = self.interrupted or self.refused is not None
        for one in runs:
            one.interrupted = early
        if not any(one.done for one in runs):
            raise self.refused or KeyboardInterrupt

    def status(self, agreed: bool) -> int:
        """The exit status: 0, 1 (the runs do not agree) or 130 (Ctrl-C).

        Raises:
            Refused: it could not go on; what was made is written by now.
        """
        if self.refused is not None:
            raise self.refused
        return 130 if self.interrupted else 0 if agreed else 1


@contextmanager
def refusing(smaller: str = "--ranks, --dim or --batch") -> Iterator[None]:
    """What can go wrong with processes, memory and ports on a machine, as one line."""
    remedy = f"if memory ran out, make {smaller} smaller"
    try:
        yield
    except WireError as error:
        raise Refused(f"{_line(error)}; {remedy}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Refused(f"no free port on 127.0.0.1 for the ranks to meet: {error}") from error
        raise Refused(f"{_line(error)}; {remedy}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise Refused(f"too little memory; make {smaller} smaller") from error
        raise


def _line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error) or type(error).__name__).splitlines()[0]

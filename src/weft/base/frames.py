"""Whose code a frame runs: the user's program's, or a library's (weft, torch, Python's own).

It goes by the folders that these were imported from. Other folders may have their names: a
checkout is called weft, and so may be the folder of somebody's program.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import TracebackType

import torch

_WEFT = Path(__file__).parents[1]
_LIBRARIES = tuple(os.path.join(each, "") for each in (_WEFT, torch.__path__[0]))
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")


def is_library(file: str) -> bool:
    """Whether a file's code is a library's.

    Example:
        >>> import threading
        >>> is_library(threading.__file__), is_library("/home/me/weft/train.py")
        (True, False)
    """
    in_python = file.startswith(_PYTHON) and "-packages" not in file.removeprefix(_PYTHON)
    return in_python or file.startswith((*_LIBRARIES, "<frozen "))


def is_within_libraries(trace: TracebackType | None) -> bool:
    """Whether no frame of a traceback is the user's program's."""
    while trace is not None:
        if not is_library(trace.tb_frame.f_code.co_filename):
            return False
        trace = trace.tb_next
    return True

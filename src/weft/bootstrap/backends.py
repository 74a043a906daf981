"""The backends of torch.distributed that `weft.init` can start: what each needs, what to install.

A backend is the name that a person gives; its spec is what `init_process_group` is told, in which
CPU tensors have a backend of their own where the named one is for another device. To add one,
write a function that returns the spec or raises, and name it in `_BACKENDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from ..backend import MPI, WEFT
from ..errors import WeftError

__all__ = ["able", "best", "is_in", "known", "spec"]


def spec(backend: str) -> str:
    """What torch.distributed calls a backend.

    Raises:
        WeftError: there is no such backend, or it is not on this machine.

    Example:
        >>> spec("gloo")
        'gloo'
    """
    _check_known(backend)
    return _BACKENDS[backend]()


def is_in(backend: str, there: str) -> bool:
    """Whether a group whose spec is `there` has a backend.

    Raises:
        WeftError: there is no such backend.

    Example:
        >>> is_in("nccl", "cpu:gloo,cuda:nccl"), is_in("mpi", "cpu:weft_mpi"), is_in("ucc", "gloo")
        (True, True, False)
    """
    _check_known(backend)
    names = {part.rpartition(":")[2] for part in there.split(",")}
    return backend in names or (backend == "mpi" and MPI in names)


def known() -> list[str]:
    """The names, all of them."""
    return list(_BACKENDS)


def able() -> tuple[str, ...]:
    """What this process's devices would choose, best first; gloo is always among them."""
    found = ["gloo"]
    if torch.cuda.is_available() and dist.is_nccl_available():
        found.insert(0, "nccl")
    elif _has_xpu() and dist.is_xccl_available():
        found.insert(0, "xccl")
    return tuple(found)


def best(abilities: Iterable[tuple[str, ...]]) -> str:
    """The first choice that all ranks have.

    Example:
        >>> best([("nccl", "gloo"), ("gloo",)])
        'gloo'
    """
    first, *others = abilities
    return next(name for name in first if all(name in each for each in others))


def _gloo() -> str:
    return "gloo"


def _weft() -> str:
    return f"cpu:{WEFT}"


def _nccl() -> str:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise WeftError(
            "backend 'nccl' needs a GPU and a CUDA build of torch, and there is "
            f"{'no GPU' if dist.is_nccl_available() else f'torch {torch.version.__version__}'}: "
            "use gloo, or install torch as pytorch.org says for your CUDA"
        )
    return "cpu:gloo,cuda:nccl"


def _xccl() -> str:
    if not (_has_xpu() and dist.is_xccl_available()):
        raise WeftError(
            "backend 'xccl' needs an Intel GPU and an XPU build of torch, and there is torch "
            f"{torch.version.__version__}: use gloo, or pip install torch --index-url "
            "https://download.pytorch.org/whl/xpu"
        )
    return "cpu:gloo,xpu:xccl"


def _ccl() -> str:
    try:
        importlib.import_module("oneccl_bindings_for_pytorch")  # registers the backend
    except ImportError as error:
        raise WeftError(
            "backend 'ccl' needs oneCCL's bindings, which are not installed: pip install "
            "oneccl_bindings_for_pytorch, in the version of this torch "
            f"({torch.version.__version__}), or use gloo"
        ) from error
    return "ccl"


def _ucc() -> str:
    if not dist.is_ucc_available():
        raise WeftError(
            f"backend 'ucc' is not in this build of torch ({torch.version.__version__}): use gloo, "
            "or build torch with USE_UCC=1"
        )
    return "ucc"


def _mpi() -> str:
    from ..wire import mpi  # here: `import weft` shall be quick

    mpi.load()  # raises if it cannot; MPI itself is started when all ranks have come
    return f"cpu:{MPI}"  # "mpi" is torch's own, which its wheels lack


def _check_known(backend: str) -> None:
    if backend not in _BACKENDS:
        raise WeftError(f"backend {backend!r} is unknown: use one of {', '.join(known())}")


_BACKENDS: dict[str, Callable[[], str]] = {
    "gloo": _gloo,
    "weft": _weft,
    "nccl": _nccl,
    "xccl": _xccl,
    "ccl": _ccl,
    "ucc": _ucc,
    "mpi": _mpi,
}


def _has_xpu() -> bool:
    return hasattr(torch, "xpu") and torch.xpu.is_available()

"""Everything of torch that is private, in one place, each piece with what serves without it.

The rest of weft uses torch's public functions only. What is here has no public counterpart, or one
that costs too much in each call. A name that a release of torch lacks is no error: the piece then
does what its docstring says. Nothing here knows of ranks or of weft's own types.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.profiler import record_function

P = ParamSpec("P")
T = TypeVar("T")


def _private(path: str) -> Any:
    """What lies at a dotted path below torch; None if this release of torch lacks it.

    Example:
        >>> _private("_C._current_graph_task_id")()
        -1
        >>> _private("_C._no_such_name.at_all")
    """
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# Modes and transforms ------------------------------------------------------------------------

_jit_traces = _private("_C._is_tracing")
leaves_of = _private("utils._pytree.tree_leaves") or (lambda tree: [tree])
_modes = _private("_C._len_torch_function_stack")
_no_modes = _private("_C.DisableTorchFunction")
_dispatching = _private("_C._len_torch_dispatch_stack") or (lambda: 0)
_mode_of_kind = _private("_C._get_dispatch_mode") or (lambda kind: None)
_FAKE = _private("_C._TorchDispatchModeKey.FAKE")
_PROXY = _private("_C._TorchDispatchModeKey.PROXY")
_is_included = _private("_C._dispatch_tls_is_dispatch_key_included") or (lambda key: False)
_PRE_DISPATCH = _private("_C.DispatchKey.PreDispatch")
_no_dispatching = _private("utils._python_dispatch._disable_current_modes") or nullcontext
_transform = _private("_C._functorch.peek_interpreter_stack")
_no_transforms = _private("_C._DisableFuncTorch")
_wrapped = _private("_C._functorch.is_functorch_wrapped_tensor")


def without_modes(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, in which no torch function or dispatch mode of its caller is active.

    `torch.set_default_device("cuda")` is such a mode: each tensor that is made without a device is
    made there. weft's own are memory that messages lie in, so they belong on the CPU. Selective
    checkpointing is a dispatch mode, which would take what a call allocates for what to keep, and
    FakeTensorMode another, in which nothing has memory. Where torch does not say how many modes are
    active, they are disabled in every call, which takes longer; where it cannot disable them, the
    function stays as it is.

    Example:
        >>> with torch.device("meta"):
        ...     torch.empty(1).device.type, without_modes(torch.empty)(1).device.type
        ('meta', 'cpu')
    """
    if _no_modes is None:
        return function

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        if _modes is not None and not _modes() and not _dispatching():
            return function(*args, **kwargs)
        was = _caller.is_traced
        _caller.is_traced = is_traced()
        try:
            with _no_modes(), _no_dispatching():
                return function(*args, **kwargs)
        finally:
            _caller.is_traced = was

    return inside


class _Caller(threading.local):
    """Whether the caller of the function without modes that this thread is in is traced."""

    is_traced = False


_caller = _Caller()


def is_tracing() -> bool:
    """Whether torch.jit.trace, or make_fx, which torch.func.linearize uses, traces what is called.

    What they do not see dispatched, such as what comes from another rank, is a constant to them.
    Without the private names it is never so.
    """
    if _jit_traces is not None and _jit_traces():
        return True
    return _mode_of_kind(_PROXY) is not None or _is_included(_PRE_DISPATCH)


def is_traced() -> bool:
    """Whether that is so here, or where a function without modes, that this is in, was called."""
    return _caller.is_traced or is_tracing()


def without_transforms(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, outside of the transforms of torch.func's that its caller is in.

    In those all that is made stands for something else, which has no memory for a message. Where
    torch cannot leave them, the function stays as it is.

    Example:
        >>> make = without_transforms(torch.empty)
        >>> made = []
        >>> _ = torch.func.grad(lambda x: made.append(make(1)) or x)(torch.tensor(1.0))
        >>> is_wrapped(made[0])
        False
    """
    if _no_transforms is None:
        return function

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if _transform is not None and _transform() is None:
            return function(*args, **kwargs)
        with _no_transforms():
            return function(*args, **kwargs)

    return outside


def profiled(call: str) -> AbstractContextManager[object]:
    """A range of the profiler for a call of weft's; nothing if none runs: a range takes 8 µs.

    All calls of a name count together, whichever call a backward is of. Without the private name it
    is always a range.

    Example:
        >>> with torch.profiler.profile() as profile, profiled("exchange backward of call 7"):
        ...     pass
        >>> [event.key for event in profile.key_averages()]
        ['weft::exchange backward']
    """
    if not _is_profiling():
        return _NO_RANGE
    return record_function(_range_of(call))


_NO_RANGE = nullcontext()


def profiled_until(call: str) -> Callable[[], None]:
    """Begin a range of the profiler for a call that another thread is going to make.

    A profiler records the threads that it was started in and for, and weft's own are none of these.
    So the range begins here, where the caller is, and ends when the returned function is called, in
    whatever thread. Nothing happens if no profiler runs, or where torch cannot end a range so.

    Example:
        >>> with torch.profiler.profile() as profile:
        ...     end = profiled_until("exchange")
        ...     end()
        >>> [event.key for event in profile.key_averages()]
        ['weft::exchange']
    """
    if not _is_profiling() or not hasattr(record_function, "_call_end_callbacks_on_future"):
        return _nothing
    ended: torch.futures.Future[None] = torch.futures.Future()
    begun: Any = record_function(_range_of(call))  # whose methods have no types
    begun.__enter__()
    begun._call_end_callbacks_on_future(ended)
    return functools.partial(ended.set_result, None)


def _nothing() -> None:
    return None


def _is_profiling() -> bool:
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def _range_of(call: str) -> str:
    """The name of a call's range, which leaves out which call a backward is of."""
    return f"weft::{call.partition(' of call')[0]}"


def is_of_group(error: BaseException | None) -> bool:
    """Whether a process group raised that: a RuntimeError, of which gloo's have a text alone.

    Example:
        >>> is_of_group(dist.DistBackendError("NCCL communicator was aborted on rank 1."))
        True
    """
    said = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, dist.DistError) or "gloo" in said or "caused pair closure" in said


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor stands for another, or for many, in a transform of torch.func's.

    Without the private name: whether a plain strided tensor has no address.
    """
    if _wrapped is not None:
        return cast(bool, _wrapped(tensor))
    return type(tensor) in (Tensor, torch.nn.Parameter) and lacks_address(tensor)


def lacks_address(tensor: Tensor) -> bool:
    """Whether a strided tensor has no memory of its own, since it stands for others."""
    try:
        if tensor.layout == torch.strided:
            tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def waited(tensor: Tensor) -> Tensor:
    """What a functional collective of torch's has promised, once it is there; else the tensor.

    Where its class has no such method, the tensor stays as it is.
    """
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else cast(Tensor, wait())


_awaits_inputs = _private("_C._distributed_c10d._allow_inflight_collective_as_graph_input")
_register_work = _private("_C._distributed_c10d._register_work")


def are_promised() -> bool:
    """Whether torch's `wait_tensor` is to wait for the collectives that begin here.

    So it is in torch's `allow_inflight_collective_as_graph_input_ctx`, and nowhere without the
    private names.
    """
    return None not in (_awaits_inputs, _register_work) and bool(_awaits_inputs())


def promise(work: dist.Work, tensor: Tensor) -> None:
    """Have torch's `wait_tensor` of a tensor wait for a work, which torch keeps until then."""
    _register_work(tensor, work)


def is_faking() -> bool:
    """Whether FakeTensorMode is one of these. False where torch does not say."""
    return _mode_of_kind(_FAKE) is not None


# The compiler --------------------------------------------------------------------------------

_frames = _private("_C._dynamo.eval_frame")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which torch.compile calls as it is, and does not look into.

    What talks to other ranks cannot be traced: the graph breaks there. This is what
    `torch.compiler.disable` does, which takes a second to import and time in each call, and which
    serves where the private names are missing.

    Example:
        >>> import weft
        >>> with weft.init():
        ...     torch.compile(lambda x: weft.all_reduce(2 * x) + 1, backend="eager")(torch.ones(2))
        tensor([3., 3.])
    """
    inside: Any = function
    try:
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(inside.__code__, _frames._FrameExecStrategy(skip, skip))
    except AttributeError:
        disable: Any = torch.compiler.disable  # which has no types
        return cast(Callable[P, T], disable(function))
    inside._torchdynamo_disable = True  # by which the compiler knows
    return function


# Autograd ------------------------------------------------------------------------------------

_graph_task = _private("_C._current_graph_task_id")
_engine = getattr(Variable, "_execution_engine", None)
_will_run = _private("_C._will_engine_execute_node")


def backward_id() -> int:
    """A number for the backward pass that this thread is in; -1 in none.

    Also -1 where torch lacks the names: then nothing is left to the end of a backward pass.
    """
    if _graph_task is None or not hasattr(_engine, "queue_callback"):
        return -1
    return cast(int, _graph_task())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have a function called at the end of this backward pass, where `backward_id` has one."""
    cast(Any, _engine).queue_callback(callback)


def is_run(node: Any) -> bool:
    """Whether the backward pass that this thread is in runs a node; True where torch cannot say.

    `torch.autograd.grad` runs no leaves: those that it was asked for are an error to the engine.
    """
    if _will_run is None:
        return True
    try:
        return cast(bool, _will_run(node))
    except RuntimeError:
        return False


def has_run(ddp_model: torch.nn.Module) -> bool:
    """Whether a forward of a DistributedDataParallel model was run.

    Without the private name: whether it has gradients by now.
    """
    ran = getattr(ddp_model, "_lazy_init_ran", None)
    return any(p.grad is not None for p in ddp_model.parameters()) if ran is None else bool(ran)


# DTensor -------------------------------------------------------------------------------------


def shard_order(tensor: Any) -> Sequence[Any]:
    """In which order mesh dimensions cut a DTensor: (tensor dimension, mesh dimensions) in turn.

    Nothing where this release of torch keeps no order besides the placements.
    """
    return getattr(getattr(tensor, "_spec", None), "shard_order", None) or ()


# Process groups ------------------------------------------------------------------------------


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of that name, as torch.compile writes it into a graph.

    Without the private name only the default group is found.

    Raises:
        KeyError: this process has none.
    """
    resolve = getattr(distributed_c10d, "_resolve_process_group", None)
    if resolve is not None:
        try:
            return cast(dist.ProcessGroup, resolve(name))
        except (RuntimeError, ValueError) as error:
            raise KeyError(name) from error
    world = dist.GroupMember.WORLD if dist.is_initialized() else None
    if world is None or world.group_name != name:
        raise KeyError(name)
    return world


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store of a group that torch still knows, which no other group has; else None.

    Without the private name: the store that the group itself has, in releases where it does.
    """
    private = getattr(distributed_c10d, "_get_process_group_store", None)
    try:
        if private is not None:
            return cast("dist.Store | None", private(group))
        dist.get_process_group_ranks(group)  # knows no group that was destroyed
        return cast("dist.Store | None", cast(Any, group).get_group_store())
    except (KeyError, ValueError, RuntimeError, AttributeError):
        return None


def serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group has a backend for the tensors of a device; yes, where torch does not say.

    Of one for several devices, `cpu:weft,cuda:nccl`, torch keeps what is written in Python alone.
    """
    kinds = {each.type for each in getattr(group, "_device_types", (device,))}
    return device.type in kinds


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that an operation of a group may last; torch's default where it does not say."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return default_timeout()


def default_timeout() -> float:
    """Seconds that an operation of a group may last for which nobody has said how long."""
    return float(distributed_c10d.default_pg_timeout.total_seconds())


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Let operations of a group last so long; of gloo's and NCCL's, where torch can set it."""
    if _set_timeout is not None:
        _set_timeout(timedelta(seconds=seconds), group)


def can_set_timeout() -> bool:
    """Whether `set_timeout` does anything in this release of torch."""
    return _set_timeout is not None


# the first since torch 2.15, which warns of the other one
_set_timeout = _private("distributed.set_timeout") or _private(
    "distributed.distributed_c10d._set_pg_timeout"
)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What serves the tensors of a device in a group; None if nothing does, or torch hides it."""
    try:
        return cast(Any, group)._get_backend(device)
    except (RuntimeError, AttributeError):
        return None


class NoDevice(RuntimeError):
    """gloo cannot listen on this machine, for which no other rank is the reason."""


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: float, interfaces: Sequence[str]
) -> Any:
    """A gloo group whose operations run one after the other; collective.

    It has one thread. Of two, which is gloo's default, both may write the name of the operation
    that each has ended to one string at once, which corrupts the memory of the process, if one of
    these is a sparse all-reduce (docs/ddp.md). It listens at the interfaces of these names; without
    names where gloo likes.

    Without the private options it is torch's own, with two threads.

    Raises:
        NoDevice: gloo cannot listen here.
        RuntimeError: from gloo or the store.
    """
    gloo: Any = dist.ProcessGroupGloo
    limit = timedelta(seconds=timeout)
    options: Any
    try:
        options = gloo._Options()
        options._threads = 1
        options._timeout = limit
        devices = [gloo.create_device(interface=name) for name in interfaces]
        options._devices = devices or [gloo.create_default_device()]
    except AttributeError:
        options = limit
    except RuntimeError as error:
        raise NoDevice(str(error)) from error
    return gloo(store, rank, size, options)


def process_group_of(
    backend: Any, store: dist.Store, rank: int, size: int, kind: str = "gloo", device: str = "cpu"
) -> dist.ProcessGroup:
    """A process group that `torch.distributed`'s functions take, over a backend of that kind.

    It has no name, and torch keeps no list of such groups: it goes when nobody refers to it, and
    the program's own groups have the names that they have without it.
    """
    type_of_kind = dist.Backend.backend_type_map.get(kind, dist.ProcessGroup.BackendType.CUSTOM)
    group: Any = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(type_of_kind)
    group._register_backend(torch.device(device), type_of_kind, backend)
    return cast("dist.ProcessGroup", group)


def new_process_group(
    kind: str, device: str, store: dist.Store, rank: int, size: int, timeout: float
) -> dist.ProcessGroup:
    """A new one for tensors of that kind of device, as `process_group_of` makes it; collective.

    Backends that torch gets from a plugin are made as it makes them, with the private list of these
    alone.

    Args:
        kind: of the backend, such as "nccl".
        device: such as "cuda".
        store: which nobody else uses.
        rank, size: of the ranks that share it.
        timeout: seconds that an operation may last.

    Raises:
        RuntimeError: torch has no such backend, or it cannot be made.
    """
    makers = {
        "gloo": getattr(dist, "ProcessGroupGloo", None),
        "nccl": getattr(dist, "ProcessGroupNCCL", None),
        "xccl": getattr(dist, "ProcessGroupXCCL", None),
        "ucc": getattr(dist, "ProcessGroupUCC", None),
    }
    maker: Any = makers.get(kind)
    plugin = getattr(dist.Backend, "_plugins", {}).get(kind.upper())
    if maker is None and plugin is not None and not plugin.extended_api:
        maker = plugin.creator_fn
    if maker is None:
        raise RuntimeError(f"torch makes no {kind} group that is not the program's")
    limit: Any = timedelta(seconds=timeout)
    if kind in ("nccl", "xccl"):
        options = maker.Options()
        options._timeout = limit
        limit = options
    return process_group_of(maker(store, rank, size, limit), store, rank, size, kind, device)


# Forked children ------------------------------------------------------------------------------

_inherited: list[Any] = []


def is_inherited(group: object) -> bool:
    """Whether a group is of the parent of this process, which has forked it."""
    return any(each is group for each in _inherited)


def keep(thing: object) -> None:
    """Keep something, and what it refers to, until the process has ended: nothing destroys it.

    In a forked child this is for what waits, when it is destroyed, for threads of its own, which
    the child does not have: groups of gloo, and stores (torch 2.13: a hang, or SIGSEGV).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _after_fork() -> None:
    groups = _private("distributed.distributed_c10d._world.pg_map") or [dist.group.WORLD]
    _inherited[:] = groups
    keep([*groups])


os.register_at_fork(after_in_child=_after_fork)

"""What weft does on an accelerator beside its caller: in streams of its own, one for each group.

Only an asynchronous call does: behind what the caller's stream does when the call is made. The
caller's stream goes on behind it when the result is asked for.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream records a CUDA graph, in which no size can be read."""
    if device.type != "cuda":
        return False
    is_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    return is_in_use and torch.cuda.is_current_stream_capturing()


IN_A_GRAPH = (
    "the stream records a CUDA graph, and ranks speak to each other on the host: call weft outside "
    "of the graph"
)
"""What is wrong where `is_capturing`."""

_OWN_CAPTURES = 1  # cudaStreamCaptureModeThreadLocal


def claim_thread(device: torch.device) -> None:
    """Make a device that of the current thread, which is weft's own.

    Else it has device 0, where torch makes a context as soon as a stream of another is left. And by
    default CUDA ends the capture of a graph in any thread as soon as another thread asks whether an
    event is through; from here on this one may ask.
    """
    torch.accelerator.set_device_index(device)
    runtime = cuda_runtime() if device.type == "cuda" else None
    if runtime is not None:
        mode = ctypes.c_int(_OWN_CAPTURES)
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@functools.cache
def cuda_runtime() -> ctypes.CDLL | None:
    """CUDA's runtime as torch has loaded it; None: there is none. torch has no name for the mode of
    a thread."""
    path = loaded_library("libcudart.so")
    return None if path is None else ctypes.CDLL(path)


def loaded_library(library: str) -> str | None:
    """The path of a library that this process has loaded, by the beginning of its name."""
    maps = Path("/proc/self/maps")
    if not maps.exists():  # not Linux
        return None
    # address, permissions, offset, device, inode, path
    fields = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    paths = [each[5] for each in fields if len(each) == 6]
    return next((path for path in paths if Path(path).name.startswith(library)), None)


def accelerators(device: torch.device) -> list[int | str | torch.device]:
    """The device, if it has streams: what a Future of a tensor there is given as its devices."""
    return [] if device.type == "cpu" else [device]


def current() -> torch.device:
    """The accelerator that this process computes on by now; the CPU if on none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or not torch.get_device_module(kind).is_initialized():
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


class Streams:
    """weft's own streams, one for each device, of one group.

    What is queued there waits for other ranks. Two groups that shared a stream would wait for each
    other, where ranks call them in different orders.
    """

    def __init__(self) -> None:
        self._own: dict[torch.device, torch.Stream] = {}
        self._lock = threading.Lock()

    def on(self, device: torch.device) -> torch.Stream:
        """The stream on a device, as an object that nobody else has.

        Entered, an object remembers what was current before: with one for all threads, one thread
        would leave to the stream of another.
        """
        with self._lock:
            if device not in self._own:
                self._own[device] = _new_stream(device)
        own = self._own[device]
        return torch.Stream(own.stream_id, own.device_index, own.device_type)


def _new_stream(device: torch.device) -> torch.Stream:
    """A stream of a pool that programs do not draw from, whose streams are used again in turn."""
    return torch.Stream(device, priority=-1)


idle_stream = functools.cache(_new_stream)  # of each device the stream in which nothing is computed


class Aside(Generic[T]):
    """A job in weft's own stream of a device, whose results the caller's stream waits for.

    It holds the memory that it reads until it is gone.

    Attributes:
        accelerators: the device, if it has streams.

    Example:
        >>> import torch
        >>> job = Aside(Streams(), torch.device("cpu"), lambda: torch.ones(2))  # which has none
        >>> job.joined(job())
        tensor([1., 1.])
    """

    def __init__(
        self,
        streams: Streams,
        device: torch.device,
        job: Callable[[], T],
        finish: Callable[[T], Any] | None = None,
    ) -> None:
        """Made in the caller's thread: the job follows what is in the caller's stream by now.

        Args:
            streams: of the group.
            device: of the tensors.
            job: what to do.
            finish: what makes the caller's result of the job's, in the thread of who asks for it
                first; None: that is it.
        """
        self._finish = finish
        self._finishing = threading.Lock()
        self._finished: list[Any] = []  # the caller's result, once somebody has asked
        self._streams = streams
        self._device = device
        self._job = job
        self.accelerators = accelerators(device)
        if self.accelerators:
            self._before, self._behind = torch.Event(device), torch.Event(device)
            self._before.record(torch.accelerator.current_stream(device))

    def __call__(self) -> T:
        if not self.accelerators:
            return self._job()
        with self._streams.on(self._device) as stream:
            stream.wait_event(self._before)
            try:
                return self._job()
            finally:  # the memory that it reads may go from here on
                self._behind.record(stream)
                stream.synchronize()

    def claim_thread(self) -> None:
        """Make the device that of this thread, which is weft's own."""
        if self.accelerators:
            claim_thread(self._device)

    def run(self) -> Any:
        """Do it here and now; the result, for the stream that is current."""
        return self.joined(self())

    def joined(self, result: T) -> Any:
        """The caller's result, for the stream that is current: it waits until that is there."""
        with self._finishing:
            self._join(result)
            if self._finish is None:
                return result
            if not self._finished:
                self._finished.append(self._finish(result))
                if self.accelerators:  # who asks next waits for this stream, too
                    self._behind.record(torch.accelerator.current_stream(self._device))
            return self._finished[0]

    def _join(self, result: T) -> None:
        if self.accelerators:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(self._behind)
            for tensor in _tensors(result):
                if not tensor.is_cpu:  # which is where a listener's may turn out to be
                    # freed at once, its memory is not used again before that stream is through
                    tensor.record_stream(stream)

    def apart(self) -> AbstractContextManager[object]:
        """A stream that nobody computes in, to join a result in for who is going to ask for it.

        A thread begins in the default stream, where the caller's own operations may be: joined
        there, they would wait, too.
        """
        if not self.accelerators:
            return nullcontext()
        beside = idle_stream(self._device)
        return torch.Stream(beside.stream_id, beside.device_index, beside.device_type)


def _tensors(found: Any) -> Iterator[Tensor]:
    """The dense tensors that a result is made of."""
    if isinstance(found, Tensor):
        sparse = found.layout == torch.sparse_coo
        yield from (found.indices(), found.values()) if sparse else (found,)
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            yield from _tensors(getattr(found, field.name))

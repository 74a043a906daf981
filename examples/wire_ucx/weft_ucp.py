"""UCX's C interface (ucp/api/ucp.h), by ctypes: as much of it as the wire needs.

UCX sends a message with a tag of 64 bits to an endpoint, that is to another process's worker. The
worker keeps what has come until somebody receives it. Nothing moves but in calls of `progress`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections import deque
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import libucx

OK = 0  # two values of ucs_status_t; errors are negative
IN_PROGRESS = 1

SETTINGS = {
    # in which it sees that a peer was killed, also over shared memory; its own default is 20 s
    "KEEPALIVE_INTERVAL": "0.5s",
    "POSIX_ERROR_HANDLING": "y",
    "SYSV_ERROR_HANDLING": "y",
}
"""What UCX is told, unless the environment has a setting of this name, with UCX_ before it."""


class UcxError(OSError):
    """A call of UCX has failed."""


def _structure(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# The first fields of each structure, and room for the others. The bits of `field_mask` (in the last
# one `op_attr_mask`) say which fields UCX is to look at.
_Params = _structure("ucp_params_t", field_mask=c_uint64, features=c_uint64, others=c_uint64 * 16)
_WorkerParams = _structure(
    "ucp_worker_params_t", field_mask=c_uint64, thread_mode=c_int, others=c_uint64 * 32
)
_EndpointParams = _structure(
    "ucp_ep_params_t",
    field_mask=c_uint64,
    address=c_char_p,
    error_mode=c_int,
    on_error=c_void_p,
    argument=c_void_p,
    others=c_uint64 * 16,
)
_RequestParams = _structure(
    "ucp_request_param_t",
    op_attr_mask=c_uint32,
    flags=c_uint32,
    request=c_void_p,
    callback=c_void_p,
    datatype=c_uint64,
    user_data=c_void_p,
    others=c_uint64 * 16,
)
_Info = _structure("ucp_tag_recv_info_t", sender_tag=c_uint64, length=c_size_t)

_VERSION = 1, 13  # of the interface that is described here, or a later one of version 1
_FEATURES = 1 << 0 | 1 << 4  # UCP_FEATURE_TAG, and _WAKEUP: a descriptor to wait on
_SERIALIZED = 1  # UCS_THREAD_MODE_SERIALIZED: any thread, one at a time
_PEER = 1  # UCP_ERR_HANDLING_MODE_PEER: an endpoint fails if its peer is gone
_ENDPOINT_FIELDS = 1 << 0 | 1 << 1 | 1 << 2  # the address, the mode, and what is called on errors
_CALLBACK = 1 << 1 | 1 << 2  # UCP_OP_ATTR_FIELD_CALLBACK and _USER_DATA
_FLAGS = 1 << 4  # UCP_OP_ATTR_FIELD_FLAGS
_FORCE = 1  # UCP_EP_CLOSE_FLAG_FORCE

# What UCX calls back: (request, status, ..., number) and (argument, endpoint, status).
_ON_SENT = ctypes.CFUNCTYPE(None, c_void_p, ctypes.c_int8, c_void_p)
_ON_RECEIVED = ctypes.CFUNCTYPE(None, c_void_p, ctypes.c_int8, c_void_p, c_void_p)
_ON_ERROR = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, ctypes.c_int8)


def _load() -> tuple[Any, Any]:
    ucs, _, _, ucp = libucx.load_library()
    status, handle = ctypes.c_int8, c_void_p
    ucs.ucs_status_string.restype = c_char_p
    ucs.ucs_status_string.argtypes = [status]
    for name, result, *arguments in (
        ("ucp_config_read", status, c_char_p, c_char_p, c_void_p),
        ("ucp_config_modify", status, handle, c_char_p, c_char_p),
        ("ucp_config_release", None, handle),
        ("ucp_init_version", status, c_uint, c_uint, c_void_p, handle, c_void_p),
        ("ucp_cleanup", None, handle),
        ("ucp_worker_create", status, handle, c_void_p, c_void_p),
        ("ucp_worker_destroy", None, handle),
        ("ucp_worker_get_address", status, handle, c_void_p, c_void_p),
        ("ucp_worker_release_address", None, handle, handle),
        ("ucp_worker_get_efd", status, handle, c_void_p),
        ("ucp_worker_progress", c_uint, handle),
        ("ucp_worker_arm", status, handle),
        ("ucp_worker_signal", status, handle),
        ("ucp_ep_create", status, handle, c_void_p, c_void_p),
        ("ucp_ep_close_nbx", handle, handle, c_void_p),
        ("ucp_tag_send_nbx", handle, handle, c_void_p, c_size_t, c_uint64, c_void_p),
        ("ucp_tag_send_sync_nbx", handle, handle, c_void_p, c_size_t, c_uint64, c_void_p),
        ("ucp_tag_probe_nb", handle, handle, c_uint64, c_uint64, c_int, c_void_p),
        ("ucp_tag_msg_recv_nbx", handle, handle, c_void_p, c_size_t, handle, c_void_p),
        ("ucp_request_free", None, handle),
    ):
        function = getattr(ucp, name)
        function.restype = result
        function.argtypes = arguments
    return ucs, ucp


_ucs, _ucp = _load()


def text_of(status: int) -> str:
    return _ucs.ucs_status_string(status).decode()


def _check(status: int) -> None:
    if status != OK:
        raise UcxError(f"UCX: {text_of(status)}")


class Message(NamedTuple):
    """A message that has come, at least its beginning, and that nobody has received yet."""

    handle: int
    tag: int
    length: int


class Worker:
    """Messages to and from other workers; one thread at a time uses it.

    A method that has a number starts something, and returns OK, IN_PROGRESS or an error. What is in
    progress goes on in calls of `progress`, until its number and status are in `finished`.

    Attributes:
        address: by which other workers connect to this one.
        descriptor: it gets readable when there is something to do, after `arm`.
        finished: (number, status) of what was in progress.
        failed: (endpoint, status) of those whose peers are gone.
    """

    def __init__(self) -> None:
        self.finished: deque[tuple[int, int]] = deque()
        self.failed: deque[tuple[int, int]] = deque()
        self._on_sent = _ON_SENT(self._finish)
        self._on_received = _ON_RECEIVED(self._finish_receive)
        self._on_error = _ON_ERROR(self._fail)
        self._earlier = _sockets()
        self._sockets: dict[int, int] = {}

        self._context = c_void_p()
        self._worker = c_void_p()
        self._create()
        self.descriptor = self._event_descriptor()
        self.address = self._get_address()

    def _create(self) -> None:
        config = c_void_p()
        _check(_ucp.ucp_config_read(None, None, byref(config)))
        for name, value in SETTINGS.items():
            if f"UCX_{name}" not in os.environ:
                _check(_ucp.ucp_config_modify(config, name.encode(), value.encode()))
        params = _Params(1, _FEATURES)
        _check(_ucp.ucp_init_version(*_VERSION, byref(params), config, byref(self._context)))
        _ucp.ucp_config_release(config)
        serialized = _WorkerParams(1, _SERIALIZED)
        _check(_ucp.ucp_worker_create(self._context, byref(serialized), byref(self._worker)))

    def _event_descriptor(self) -> int:
        descriptor = c_int()
        _check(_ucp.ucp_worker_get_efd(self._worker, byref(descriptor)))
        return descriptor.value

    def _get_address(self) -> bytes:
        address = c_void_p()
        length = c_size_t()
        _check(_ucp.ucp_worker_get_address(self._worker, byref(address), byref(length)))
        copy = ctypes.string_at(address, length.value)
        _ucp.ucp_worker_release_address(self._worker, address)
        return copy

    def connect(self, address: bytes) -> int:
        """An endpoint, to send to the worker with this address."""
        endpoint = c_void_p()
        on_error = ctypes.cast(self._on_error, c_void_p)
        params = _EndpointParams(_ENDPOINT_FIELDS, address, _PEER, on_error)
        _check(_ucp.ucp_ep_create(self._worker, byref(params), byref(endpoint)))
        return endpoint.value or 0

    def disconnect(self, endpoint: int, number: int) -> int:
        """Close an endpoint; what is under way there is finished with an error."""
        params = self._params(self._on_sent, number)
        params.op_attr_mask |= _FLAGS
        params.flags = _FORCE
        return _status(_ucp.ucp_ep_close_nbx(endpoint, byref(params)))

    def send(self, endpoint: int, tag: int, address: int, nbytes: int, number: int) -> int:
        """Send a message."""
        params = self._params(self._on_sent, number)
        return _status(_ucp.ucp_tag_send_nbx(endpoint, address, nbytes, tag, byref(params)))

    def send_until_received(self, endpoint: int, tag: int, number: int) -> int:
        """Send a message without bytes, which is finished when the peer has received it."""
        params = self._params(self._on_sent, number)
        return _status(_ucp.ucp_tag_send_sync_nbx(endpoint, None, 0, tag, byref(params)))

    def probe(self) -> Message | None:
        """Take one of the messages that have come."""
        info = _Info()
        handle = _ucp.ucp_tag_probe_nb(self._worker, 0, 0, True, byref(info))
        return Message(handle, info.sender_tag, info.length) if handle else None

    def receive(self, message: Message, address: int, nbytes: int, number: int) -> int:
        """Receive such a message; into less memory than its length to be rid of it."""
        params = self._params(self._on_received, number)
        return _status(
            _ucp.ucp_tag_msg_recv_nbx(self._worker, address, nbytes, message.handle, byref(params))
        )

    def progress(self) -> bool:
        """Move messages; whether there may be more to do."""
        return bool(_ucp.ucp_worker_progress(self._worker))

    def arm(self) -> bool:
        """Prepare to wait for the descriptor; False: there is something to do before."""
        return int(_ucp.ucp_worker_arm(self._worker)) == OK

    def wake(self) -> None:
        """Make the descriptor readable; any thread."""
        _ucp.ucp_worker_signal(self._worker)

    def remember_sockets(self) -> None:
        """Note which sockets are UCX's: those that have been opened since this worker was made."""
        for number, inode in _sockets().items():
            if self._earlier.get(number) != inode:
                self._sockets[number] = inode

    def forget(self) -> None:
        """In a forked child: close UCX's sockets, so that the parent's death ends connections."""
        now = _sockets()
        for number, inode in self._sockets.items():
            if now.get(number) == inode:
                os.close(number)

    def close(self) -> None:
        """End everything at once."""
        _ucp.ucp_worker_destroy(self._worker)
        _ucp.ucp_cleanup(self._context)

    def _params(self, callback: Any, number: int) -> Any:
        address = ctypes.cast(callback, c_void_p)
        return _RequestParams(op_attr_mask=_CALLBACK, callback=address, user_data=number)

    def _finish(self, request: int, status: int, number: int | None) -> None:
        _ucp.ucp_request_free(request)
        self.finished.append((number or 0, status))

    def _fail(self, _: int, endpoint: int, status: int) -> None:
        self.failed.append((endpoint, status))

    def _finish_receive(self, request: int, status: int, _: int, number: int | None) -> None:
        self._finish(request, status, number)


def _sockets() -> dict[int, int]:
    """The inodes of this process's sockets, by their descriptors."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself, which is closed again
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _status(result: int | None) -> int:
    """A call returns no pointer, a small negative number as one, or a pointer to a request."""
    if not result:
        return OK
    error = ctypes.c_int64(result).value
    return error if -100 <= error < 0 else IN_PROGRESS

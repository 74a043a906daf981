"""For tests: rounds over gloo, by which tensors of the CPU go the way of those on an accelerator.

The rounds are `weft.wire.torch_rounds`, but for the stream that carries their operations: gloo has
none, so a thread waits for each.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from dataclasses import replace
from unittest import mock

from weft.base import devices
from weft.wire import of_devices
from weft.wire.interface import Failure
from weft.wire.torch_rounds import TorchRounds


@contextlib.contextmanager
def as_device():
    """Tensors of the CPU go as on an accelerator whose process group is gloo's."""
    with devices.as_device(), mock.patch.object(of_devices, "rounds_over", GlooRounds):
        yield


class GlooRounds(TorchRounds):
    """Rounds of a process group of gloo, for which the host waits."""

    def __init__(self, group, rank, size, device):
        super().__init__(OnThread(group, size, device), range(size), rank)
        self.features = replace(self.features, streams=False)

    def among(self, ranks):
        some = super().among(ranks)
        some.features = replace(some.features, streams=False)
        return some


class OnThread:
    """In place of `torch_rounds.Operations`: a thread does one after the other."""

    def __init__(self, group, size, device):
        self.size = size
        self.device = device
        self.failure = None
        self.changed = threading.Condition()
        self.group = group
        self._queue = queue.SimpleQueue()
        threading.Thread(target=self._run, name="gloo rounds", daemon=True).start()

    def _run(self):
        while (operation := self._queue.get()) is not None:
            operation.run()

    def begin(self, run, *memory):
        operation = Operation(self, run)
        self._queue.put(operation)
        return operation

    def fail(self, failure):
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()
        return self.failure

    def close(self, failure, *, waits):
        self.fail(failure)
        self._queue.put(None)


class Operation:
    """In place of `torch_rounds.Operation`."""

    def __init__(self, operations, run):
        self._operations = operations
        self._run = run
        self._is_through = False

    def run(self):
        try:
            self._run(self._operations.group())
        except Exception as error:
            self._operations.fail(Failure("lost", None, f"the process group failed: {error}"))
            return
        with self._operations.changed:
            self._is_through = self._operations.failure is None
            self._operations.changed.notify_all()

    def is_through(self):
        return self._is_through

    def wait(self, timeout):
        def is_over():
            return self._is_through or self._operations.failure is not None

        with self._operations.changed:
            return self._operations.changed.wait_for(is_over, timeout)

    def follow_current_stream(self):
        pass

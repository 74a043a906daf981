"""oneCCL's `sparse_allreduce`, in the three generations of its interface.

Nobody knows the size of a sparse result before the call. Each generation returns it in another way:

* `request`: in buffers of the caller's, which must be large enough;
* `callback`: to a completion callback in the collective call attributes;
* `event`: to a completion callback, or in memory from an allocation callback.

Each module has the `sparse_allreduce` of its document, with the document's parameters in the same
order and under the same names. A buffer is anything that has memory (`buffers` lists what). Counts
are numbers of elements. A dtype is torch's, NumPy's or a name of oneCCL's. A reduction is a name of
weft's, a `torch.distributed.ReduceOp` or a function.

If an argument is wrong on one rank, every rank raises the same `weft.WeftError`. The rank that
passed it raises from the call itself, if the error can be seen before the buffers are read. The
other ranks raise from `wait()`; so does this rank if the error is found later.

The environment variable `CCL_SPARSE_ALLREDUCE` selects the algorithm in all three generations, by
weft's names or by oneCCL's ("ring", "mask", "allgatherv", "basic", "size").

Sources: "Sparse collective operations" in oneCCL's documentation, from the first beta releases to
2021.3, and oneCCL's public headers.
"""

from . import callback, event, request
from .buffers import Address
from .communicator import Communicator, Kvs

__all__ = ["Address", "Communicator", "Kvs", "callback", "event", "request"]

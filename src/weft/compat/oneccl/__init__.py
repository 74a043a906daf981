"""oneCCL's `sparse_allreduce`, in the three generations of its interface.

Nobody knows the size of a sparse result before the call. Each generation returns it in another way:

* `request`: in buffers of the caller's, which must be large enough;
* `callback`: to a completion callback in the collective call attributes;
* `event`: to a completion callback, or in memory from an allocation callback.

Each module has the `sparse_allreduce` of its document, with the document's parameters in the same
order and under the same names. A buffer is a contiguous torch tensor or NumPy array. Counts are
numbers of elements. A dtype is torch's, or its name: indices are of any integer type but uint64. A
reduction is a name of weft's, a `torch.distributed.ReduceOp` or a function.

If an argument is wrong on one rank, or a callback raises there, every rank raises the same
`weft.WeftError`: from the call itself, or from `wait()`. The next call works.

Sources: "Sparse collective operations" in oneCCL's documentation, from the first beta releases to
2021.3.
"""

from . import callback, event, request

__all__ = ["callback", "event", "request"]

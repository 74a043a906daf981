"""oneCCL's `sparse_allreduce`, all three generations of it.

oneCCL promised "a common API for sparse collective operations" three times, each time with
another way to hand out a result whose size nobody knows beforehand:

* `request`: into buffers of the caller's, which must be large enough;
* `callback`: to a completion callback in the collective call attributes;
* `event`: to a completion callback, or into memory from an allocation callback.

Each module has the `sparse_allreduce` of its document, with the parameters in the document's order,
under their names. Buffers are whatever has memory (see `buffers`), counts are elements, dtypes are
torch's or oneCCL's names, reductions weft's names, a `torch.distributed.ReduceOp` or a function.

What all three share: what is wrong on one rank is stated to all, and every rank raises the same
`weft.WeftError`, on the rank that erred from the call itself where that can be seen before the
buffers are read, else from `wait()`. Every algorithm of weft serves every generation; the
environment's `CCL_SPARSE_ALLREDUCE` chooses one, under oneCCL's names or weft's.

The sources are the documents of oneCCL, beta to 2021.3, and its public headers.
"""

from . import callback, event, request
from .buffers import Address
from .communicator import Communicator, Kvs

__all__ = ["Address", "Communicator", "Kvs", "callback", "event", "request"]

"""Gradients of a DistributedDataParallel model over weft: communication hooks.

`register(ddp_model)` is all that a training loop needs. `weft.sparse_all_reduce` averages sparse
gradients. The group averages dense ones; on an accelerator an all-reduce of torch's does. Both
happen while backward is still running. `.grad` then has what DistributedDataParallel itself would
compute. Trainers that take a communication hook and its state get `weft.ddp.hook` and a
`weft.ddp.State`. `TopK` and `topk_hook` send a part of each gradient only.
"""

from .backward import hook
from .registration import register
from .state import State
from .topk import TopK, topk_hook
from .unused import keep_tables_used

__all__ = ["State", "TopK", "hook", "keep_tables_used", "register", "topk_hook"]

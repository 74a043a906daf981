"""DistDL's data movement layers, by the layers of `weft.nn`.

Each is a torch.nn.Module that takes this worker's tensor, or one without elements where it has no
part, and returns new memory. Gradients, shapes and errors are those of `weft.nn`.
"""

from . import mixins as mixins
from .halo import HaloExchange as HaloExchange
from .layers import AllGather as AllGather
from .layers import AllSumReduce as AllSumReduce
from .layers import Broadcast as Broadcast
from .layers import ReduceScatter as ReduceScatter
from .layers import Repartition as Repartition
from .layers import SumReduce as SumReduce
from .module import Module as Module

DistributedTranspose = Repartition
"""The older name."""

"""DistDL's data movement layers, made of the layers of `weft.nn`.

Each is a torch.nn.Module. Its input is this worker's part of a tensor, or a tensor without elements
on a worker that has no part. Its output is a new tensor. Gradients, shapes and errors are those of
the layer of `weft.nn`.

Source: DistDL's manual, "Data Movement Layers" (AllGather and its siblings).
"""

from .halo import HaloExchange as HaloExchange
from .layers import AllGather as AllGather
from .layers import AllSumReduce as AllSumReduce
from .layers import Broadcast as Broadcast
from .layers import ReduceScatter as ReduceScatter
from .layers import Repartition as Repartition
from .layers import SumReduce as SumReduce

"""DistDL's partitions and data movement layers, under their names.

A script that was written for DistDL keeps its calls if it imports them from here, or the layers
from `weft.compat.distdl.nn`. Neither MPI nor mpi4py is needed. The first partition starts weft,
which finds the ranks by the launcher's environment (torchrun, mpirun, srun).

Sources: DistDL's manual, versions 0.5 and 0.6; Hewett and Grady, "A linear algebraic approach to
model parallelism in deep learning" (arXiv 2006.03108); and what DistDL's layers do when they run.
"""

from . import nn as nn
from .nn import AllGather as AllGather
from .nn import AllSumReduce as AllSumReduce
from .nn import Broadcast as Broadcast
from .nn import HaloExchange as HaloExchange
from .nn import ReduceScatter as ReduceScatter
from .nn import Repartition as Repartition
from .nn import SumReduce as SumReduce
from .partition import MPICartesianPartition as MPICartesianPartition
from .partition import MPIPartition as MPIPartition
from .zero_volume import zero_volume_tensor as zero_volume_tensor

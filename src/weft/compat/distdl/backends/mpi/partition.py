"""`distdl.backends.mpi.partition`, as DistDL 0.5 has it."""

from ...partition import MPICartesianPartition as MPICartesianPartition
from ...partition import MPIPartition as MPIPartition

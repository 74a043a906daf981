"""`distdl.backends.common.partition`."""

from ...partition import MPICartesianPartition as MPICartesianPartition
from ...partition import MPIPartition as MPIPartition

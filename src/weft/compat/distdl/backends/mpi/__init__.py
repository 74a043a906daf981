"""`distdl.backends.mpi`, as DistDL 0.5 has it: the one backend."""

from ...backend import BufferManager as BufferManager
from ...backend import CartesianPartition as CartesianPartition
from ...backend import ExpandableBuffer as ExpandableBuffer
from ...backend import Partition as Partition
from . import partition as partition

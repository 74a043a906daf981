"""`distdl.backends`: weft has one backend, for all devices."""

from .. import backend as backend
from . import common as common
from . import mpi as mpi

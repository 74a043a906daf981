"""`distdl.utilities`: the modules have the names that they have in DistDL."""

from . import debug as debug
from . import index_tricks as index_tricks
from . import misc as misc
from . import slicing as slicing
from . import tensor_decomposition as tensor_decomposition
from . import torch as torch

"""`distdl.utilities.torch`."""

from ..tensors import TensorStructure as TensorStructure
from ..tensors import distdl_padding_to_torch_padding as distdl_padding_to_torch_padding
from ..tensors import zero_volume_tensor as zero_volume_tensor

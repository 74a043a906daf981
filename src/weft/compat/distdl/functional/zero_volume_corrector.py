"""`distdl.functional.zero_volume_corrector`."""

from ..tensors import ZeroVolumeCorrectorFunction as ZeroVolumeCorrectorFunction

"""`distdl.functional`, but for its interpolation, which is a C++ extension of DistDL's."""

from . import zero_volume_corrector as zero_volume_corrector
from .zero_volume_corrector import ZeroVolumeCorrectorFunction as ZeroVolumeCorrectorFunction

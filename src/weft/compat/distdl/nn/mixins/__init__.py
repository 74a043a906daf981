"""`distdl.nn.mixins`: the widths of the halos that a kernel or an interpolation needs."""

from .conv_mixin import ConvMixin as ConvMixin
from .halo_mixin import HaloMixin as HaloMixin
from .interpolate_mixin import InterpolateMixin as InterpolateMixin
from .pooling_mixin import PoolingMixin as PoolingMixin

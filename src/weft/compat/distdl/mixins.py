"""`distdl.nn.mixins`, which is here, too."""

from .nn.mixins import ConvMixin as ConvMixin
from .nn.mixins import HaloMixin as HaloMixin
from .nn.mixins import InterpolateMixin as InterpolateMixin
from .nn.mixins import PoolingMixin as PoolingMixin

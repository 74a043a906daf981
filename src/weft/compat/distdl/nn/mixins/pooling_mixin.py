"""`distdl.nn.mixins.pooling_mixin`: on which input pooling depends."""

from .conv_mixin import ConvMixin


class PoolingMixin(ConvMixin):
    """The same for pooling, which depends on the same range."""

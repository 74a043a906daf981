"""Start-up: from processes that something launched to a group between them.

`init` starts weft, `look_ahead` tells what it would go by, `launchers` who launched this process,
`local` launches ranks itself. For a library whose programs bring rank and place themselves there
are `init_as` and `publish`.
"""

from ..rendezvous.places import publish
from .init import TIMEOUT, init_as
from .preview import Preview, look_ahead

__all__ = ["TIMEOUT", "Preview", "init_as", "look_ahead", "publish"]

"""Start-up: from processes that something launched to a group between them.

`init` starts weft, `look_ahead` tells what it would go by, `launchers` who launched this process,
`local` launches ranks itself. For libraries whose programs bring rank and place themselves there
are `init_as`, `publish`, stores to meet at, and `join`, which makes a group of whoever has a store.
"""

from ..group.joining import connect as join
from ..rendezvous.places import connect as connect_store
from ..rendezvous.places import host as host_store
from ..rendezvous.places import publish
from .init import TIMEOUT, init_as
from .preview import Preview, look_ahead

__all__ = [
    "TIMEOUT",
    "Preview",
    "connect_store",
    "host_store",
    "init_as",
    "join",
    "look_ahead",
    "publish",
]

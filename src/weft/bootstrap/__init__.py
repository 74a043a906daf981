"""Start-up: from processes that something launched to a wire between them.

`init` starts weft, `look_ahead` tells what it would go by, `launchers` who launched this process,
`local` launches ranks itself.
"""

from .preview import Preview, look_ahead

__all__ = ["Preview", "look_ahead"]

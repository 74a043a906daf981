"""Start-up: from processes that something launched to a wire between them.

`init` starts weft, `launchers` tells who launched this process, `local` launches ranks itself.
"""

"""Wires between ranks that are threads of one process: `threads`, and `simulated`.

The messages of both meet in a `room`.
"""

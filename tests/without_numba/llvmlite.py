"""Beside Numba, without which weft loads no machine code that another process has kept."""

raise ModuleNotFoundError("No module named 'llvmlite'", name="llvmlite")

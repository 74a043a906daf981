"""In PYTHONPATH this folder makes a Python that has no Numba, as .ci/run and a test have it."""

raise ModuleNotFoundError("No module named 'numba'", name="numba")

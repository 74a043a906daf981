"""`weft demo`: sparse gradients of a real training job summed by weft, beside PyTorch's ways.

Reads text, trains word vectors on several processes, with each way to sum the gradients, shows it
live, checks that the ways agree, and writes a report and the vectors. `command` is what the
command line calls; it imports the rest when it runs, so that `weft --help` is quick.
"""

from .command import demo

__all__ = ["demo"]

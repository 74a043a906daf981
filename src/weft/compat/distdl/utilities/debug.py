"""`distdl.utilities.debug`."""

from ..communicator import print_sequential as print_sequential

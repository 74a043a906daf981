"""Seconds that ranks of tests have, on an idle machine."""

START = 60.0
"""Seconds that new processes may take until they are where they meet, and to join a group."""

ANSWER = 2.0
"""Seconds that a rank has to say where it is."""

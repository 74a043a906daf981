"""How long a message may be for the receive that takes it."""

from __future__ import annotations


def fault_of(length: int, limit: int, *, is_sized: bool) -> str:
    """What is wrong with a message of that length, as the end of "rank 1 sent ..."; "": nothing.

    Args:
        length: of the message, in bytes.
        limit: the bytes of the receive's tensor or, by size, the most that may come.
        is_sized: whether the receive is by size.

    Example:
        >>> fault_of(9, 8, is_sized=True), fault_of(7, 8, is_sized=False)
        ('9 bytes for a receive of 8', '7 bytes for a receive of exactly 8')
        >>> fault_of(7, 8, is_sized=True)
        ''
    """
    if is_sized and length > limit:
        return f"{length} bytes for a receive of {limit}"
    if not is_sized and length != limit:
        return f"{length} bytes for a receive of exactly {limit}"
    return ""

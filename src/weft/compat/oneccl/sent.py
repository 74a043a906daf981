"""What one rank sends: the half of the parameters that all generations have alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...rows import Rows
from .attributes import Attributes
from .buffers import counted, seen
from .dtypes import Wrong, dtype_of, index_dtype_of, widened

__all__ = ["Sent"]


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sends: 1-D tensors that share the caller's memory, as many values an index."""

    indices: Tensor
    values: Tensor

    @classmethod
    def of(
        cls,
        ind_buf: Any,
        ind_count: Any,
        val_buf: Any,
        val_count: Any,
        ind_dtype: Any,
        val_dtype: Any,
        names: tuple[str, str] = ("index_dtype", "value_dtype"),
    ) -> Sent:
        """Check the sending half of a call's parameters; `names` are those of its dtypes."""
        rows, values = counted(ind_count, "send_ind_count"), counted(val_count, "send_val_count")
        if values % rows if rows else values:
            raise Wrong(
                f"{values} values do not divide among {rows} indices: send_val_count must be a "
                "multiple of send_ind_count"
            )
        index, dtype = index_dtype_of(ind_dtype, names[0]), dtype_of(val_dtype, names[1])
        return cls(
            seen(ind_buf, rows, index, "send_ind_buf"), seen(val_buf, values, dtype, "send_val_buf")
        )

    def rows(self, attributes: Attributes) -> Rows:
        """The rows that are reduced; reads the memory."""
        count, values = len(self.indices), attributes.before(self.values)
        return Rows(widened(self.indices), values.view(count, -1) if count else values)

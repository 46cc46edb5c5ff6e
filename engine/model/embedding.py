"""The table of token embeddings, in the fewest bytes that hold it exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from engine.model.weight_codes import BlockCodes, block_codes, is_bfloat16

if TYPE_CHECKING:
    from collections.abc import Callable


class Embedding:
    """Token ids to rows of a table.

    Args:
        weight: `[vocabulary, hidden]`.
        copied: Take no reference to the weight: it alone would keep the whole file mapped.
        dtype: Of the rows, by default the weight's.
        rows: Gives rows of the weight, float, where something else holds them all (an output head that is tied): no
            table is made then.

    Attributes:
        table: `[vocabulary, hidden]`, perhaps of a narrower type, or the codes of one; None where others have it.
        dtype: Of the rows.
        device: Of the rows.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        copied: bool,
        dtype: torch.dtype | None = None,
        rows: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.dtype, self.device = dtype or weight.dtype, weight.device
        self.table: torch.Tensor | BlockCodes | None = None
        if rows is not None:
            self._rows = rows
            return
        compact = copied and weight.device.type == "cpu" and weight.dtype == torch.float32
        codes = block_codes(weight) if compact else None
        if codes is not None:
            self.table, self._rows = codes, codes.rows
        elif compact and is_bfloat16(weight):
            self.table = weight.bfloat16()
        elif weight.dtype != self.dtype:
            self.table = weight.to(self.dtype)
        else:
            self.table = weight.clone() if copied else weight

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows `[T, hidden]` of int64 ids `[T]`."""
        if isinstance(self.table, torch.Tensor):
            return F.embedding(input_ids, self.table).to(self.dtype)
        return self._rows(input_ids).to(self.dtype)

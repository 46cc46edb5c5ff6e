"""One forward over a packed batch: what `ModelRunner` asks of a model, and how any transformers model serves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.attention import hook

if TYPE_CHECKING:
    from engine.attention.metadata import AttentionMetadata, PagedAttention


class Forward(Protocol):
    """Computes a batch."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Compute one packed batch; keys and values go to the cache.

        Args:
            input_ids: int64 `[T]`.
            positions: int64 `[T]`.
            rows: int64 `[R]`, the rows whose logits are wanted; at least one.
            metadata: The batch.

        Returns:
            Logits `[R, vocab]` in the model's dtype.
        """
        ...


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model's attention layers put into the cache.

    Attributes:
        window: Positions that no layer looks further back than, itself included; 0 where a layer sees all.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0


class HookedModel:
    """A transformers model over the paged cache, through transformers' own attention hook.

    Args:
        model: A causal language model, in eval mode; from here on its attention is the hook's.
        attention: The implementation to call.
    """

    def __init__(self, model: Any, attention: PagedAttention) -> None:
        hook.register()
        self.model = model
        self.attention = attention
        model.set_attn_implementation(hook.ATTENTION_NAME)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """See `Forward`."""
        return self._run(input_ids, positions, rows, hook.PagedContext(self.attention, metadata))

    def probe(self, num_tokens: int = 2) -> list[hook.LayerShape]:
        """What each attention layer hands over, in the order of the calls; nothing is attended to."""
        context = hook.ProbeContext()
        ids = torch.ones(num_tokens, dtype=torch.int64, device=self.model.device)
        positions = torch.arange(num_tokens, device=self.model.device)
        self._run(ids, positions, positions[-1:], context)
        return context.calls

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: hook.LayerContext
    ) -> torch.Tensor:
        with hook.running(context):
            # use_cache: by default transformers would keep keys and values of its own.
            logits: torch.Tensor = self.model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=rows,
            ).logits[0]
        # A model that does not know logits_to_keep gives all rows.
        return logits if len(logits) == len(rows) else logits[rows]

"""The way from a transformers model's attention layers to paged attention.

transformers looks its attention up by name (`AttentionInterface`); the function registered here takes its place in
every layer. What the batch is lies in a context variable while the model runs: some models' layers (StableLM's) drop
keywords on the way to their attention.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.attention.metadata import AttentionMetadata, PagedAttention

ATTENTION_NAME = "engine_paged"
"""Free of `sdpa`, `flash` and `/`, which transformers dispatches elsewhere. No mask function is registered under it,
and so transformers builds no mask."""


class HookError(Exception):
    """A layer asks for something that paged attention does not do; its text says what."""


class LayerContext(Protocol):
    """What a batch is to the layers: told of one layer's query, key and value, it gives the attention's output."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """Attend; query, key and value are `[T, heads, D]`, and so is the result."""
        ...


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What a layer asks of its attention beyond the tensors; see `PagedAttention`."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(slots=True)
class PagedContext:
    """Runs one implementation over one step's batch."""

    attention: PagedAttention
    metadata: AttentionMetadata

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """See `LayerContext`."""
        return self.attention(
            query,
            key,
            value,
            layer,
            self.metadata,
            scale=options.scale,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks,
        )


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer handed over in a probe."""

    layer: int
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    options: LayerOptions


@dataclass(slots=True)
class ProbeContext:
    """Computes nothing and notes the shapes, to learn a model's cache from the model itself."""

    calls: list[LayerShape] = field(default_factory=list)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """See `LayerContext`."""
        self.calls.append(
            LayerShape(layer, query.shape[1], key.shape[1], key.shape[2], value.shape[2], options),
        )
        return torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)


_current: ContextVar[LayerContext | None] = ContextVar("paged attention's batch", default=None)


@contextlib.contextmanager
def running(context: LayerContext) -> Iterator[None]:
    """While it is open, this is what the layers' attention goes to."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def layer_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer.

    Args:
        module: The attention layer; its `layer_idx` names the layer.
        query: `[1, Hq, T, D]`, rotary positions applied.
        key: `[1, Hkv, T, D]`, heads not repeated.
        value: `[1, Hkv, T, D]`.
        attention_mask: Must be None: causality comes from the batch's metadata.
        scaling: Factor on the scores, by default `D ** -0.5`.
        dropout: Must be 0.
        sliding_window: See `PagedAttention`.
        softcap: See `PagedAttention`.
        s_aux: Sinks, `[Hq]`.
        position_bias: Must be None.

    Returns:
        `[1, T, Hq, D]`, and None for the attention weights.

    Raises:
        HookError: The layer asks for what paged attention does not do.
    """
    context = _current.get()
    if context is None:
        raise HookError("the model runs without the batch's context")
    if attention_mask is not None:
        raise HookError("its layers bring an attention mask of their own")
    if position_bias is not None:
        raise HookError("its layers add a position bias to the scores")
    if dropout:
        raise HookError("its attention uses dropout (call eval() first)")
    if not getattr(module, "is_causal", True):
        raise HookError("its attention is not causal")
    if query.shape[0] != 1:
        raise HookError("its layers split the batch")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise HookError("its attention layers have no layer_idx")
    options = LayerOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window or None,
        softcap=softcap or None,
        sinks=s_aux,
    )
    out = context.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), options)
    return out.unsqueeze(0), None


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers; more than once does no harm."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, layer_attention)

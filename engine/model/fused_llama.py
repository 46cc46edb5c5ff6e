"""The Llama family's forward with fewer, larger operations.

Llama, SmolLM, Mistral, Qwen2 and Qwen3 share one layer: RMS norm, attention with rotary positions, RMS norm, gated MLP.
transformers computes it in some forty small operations; here the three attention projections are one, gate and up are
one, the residual stream is updated in place, and what lies between the linear layers is done in few passes
(`layer_operations.py`). The weights are transformers' own. `FusedLlama.of` refuses whatever it does not know exactly,
and the loader compares the logits of both before it lets this one take over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.model.embedding import Embedding
from engine.model.layer_operations import LayerAttention, Norm, make_operations
from engine.model.projection import MakeProjection, Original, Projection, as_it_is, borrow, join, make_projection, packs

if TYPE_CHECKING:
    from engine.attention.metadata import AttentionMetadata, PagedAttention

_KNOWN = {
    "LlamaForCausalLM": "LlamaDecoderLayer",
    "MistralForCausalLM": "MistralDecoderLayer",
    "Qwen2ForCausalLM": "Qwen2DecoderLayer",
    "Qwen3ForCausalLM": "Qwen3DecoderLayer",
}


class NotFusableError(Exception):
    """The model is not one that this forward reproduces; its text says what differs."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Norm
    qkv: Projection
    attention: LayerAttention
    out: Projection
    post_norm: Norm
    gate_up: Projection
    down: Projection


class FusedLlama:
    """A Llama-family model over the paged cache."""

    def __init__(
        self,
        model: Any,
        attention: PagedAttention,
        layers: list[_Layer],
        max_positions: int,
        make: MakeProjection = make_projection,
        original: Original = as_it_is,
    ) -> None:
        self._layers = layers
        embedding = model.model.embed_tokens.weight.detach()
        # Where the linear layers have copies, the embedding has one too: it alone would keep the whole file mapped.
        copied = make is not borrow and (make is not make_projection or packs(embedding))
        table = original(embedding)
        self._norm = Norm.of(model.model.norm)
        self._next_norms = [*(layer.input_norm for layer in layers[1:]), self._norm]
        head = model.lm_head.weight.detach()
        tied = head.data_ptr() == embedding.data_ptr() and head.shape == embedding.shape
        self._head = make(table if tied else original(head), _bias(model.lm_head))
        # A head that holds the table exactly gives its rows as well: it need not lie in memory twice.
        rows = getattr(self._head, "rows", None) if tied and copied else None
        self._embedding = Embedding(table, copied=copied, dtype=embedding.dtype, rows=rows)
        positions = torch.arange(max_positions, device=self._embedding.device)[None]
        with torch.inference_mode():
            cos, sin = model.model.rotary_emb(embedding[:1], positions)
        num_kv_heads: int = model.config.num_key_value_heads
        self._operations = make_operations(attention, cos[0], sin[0], num_kv_heads, self._embedding.dtype)

    @classmethod
    def of(
        cls,
        model: Any,
        attention: PagedAttention,
        max_positions: int,
        make: MakeProjection = make_projection,
        original: Original = as_it_is,
    ) -> FusedLlama:
        """Take over a transformers model's weights.

        Args:
            model: A `...ForCausalLM` of the family.
            attention: The implementation to call.
            max_positions: Positions to prepare rotary angles for: the longest sequence that will come.
            make: How the weights of linear layers are laid out.
            original: What the model's matrices were rounded from, for `make`.

        Raises:
            NotFusableError: The model differs from the family in something this forward would get wrong.
        """
        name, config = type(model).__name__, model.config
        if name not in _KNOWN:
            raise NotFusableError(f"{name} is not of the Llama family")
        if getattr(config, "hidden_act", "silu") != "silu":
            raise NotFusableError(f"its activation is {config.hidden_act}, not silu")
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in {"dynamic", "longrope"}:
            raise NotFusableError(f"its rotary positions ({rope}) depend on the length of the batch")
        for layer in model.model.layers:
            if type(layer).__name__ != _KNOWN[name]:
                raise NotFusableError(f"one of its layers is a {type(layer).__name__}, not a {_KNOWN[name]}")
        try:
            layers = [_fuse(index, layer, make, original) for index, layer in enumerate(model.model.layers)]
        except (AttributeError, ValueError) as error:
            raise NotFusableError(f"one of its layers cannot be joined: {error}") from error
        return cls(model, attention, layers, max_positions, make, original)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Compute one packed batch; keys and values go to the cache.

        Args:
            input_ids: int64 `[T]`.
            positions: int64 `[T]`.
            rows: int64 `[R]`, the rows whose logits are wanted.
            metadata: The batch.

        Returns:
            Logits `[R, vocab]` in the model's dtype.
        """
        operations = self._operations
        hidden = self._embedding(input_ids)
        angles = operations.angles(positions)
        normed = operations.norm(hidden, self._layers[0].input_norm)
        for layer, next_norm in zip(self._layers, self._next_norms, strict=True):
            context = operations.attend(layer.qkv(normed), angles, layer.attention, metadata)
            if next_norm is self._norm:
                # Nothing after the last attention looks at other rows: compute only those that are asked for.
                hidden, context = hidden[rows], context[rows]
            normed = operations.add_norm(hidden, layer.out(context), layer.post_norm)
            gated = operations.gate(layer.gate_up(normed))
            normed = operations.add_norm(hidden, layer.down(gated), next_norm)
        return self._head(normed)


def _fuse(index: int, layer: Any, make: MakeProjection, original: Original) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    query_norm = getattr(attention, "q_norm", None)
    key_norm = getattr(attention, "k_norm", None)
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    if getattr(attention.config, "use_sliding_window", True) is False:
        window = None
    return _Layer(
        input_norm=Norm.of(layer.input_layernorm),
        qkv=join([attention.q_proj, attention.k_proj, attention.v_proj], make, original),
        attention=LayerAttention(
            layer=index,
            scale=float(attention.scaling),
            sliding_window=window,
            query_norm=None if query_norm is None else Norm.of(query_norm),
            key_norm=None if key_norm is None else Norm.of(key_norm),
        ),
        out=make(original(attention.o_proj.weight), _bias(attention.o_proj)),
        post_norm=Norm.of(layer.post_attention_layernorm),
        gate_up=join([mlp.gate_proj, mlp.up_proj], make, original),
        down=make(original(mlp.down_proj.weight), _bias(mlp.down_proj)),
    )


def _bias(linear: Any) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.detach()

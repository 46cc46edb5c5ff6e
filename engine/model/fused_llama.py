"""The Llama family's forward with fewer, larger operations.

Llama, SmolLM, Mistral, Qwen2 and Qwen3 share one layer: RMS norm, attention with rotary positions, RMS norm, gated MLP.
transformers computes it in some forty small operations; here the three attention projections are one, gate and up are
one, and the residual stream is updated in place. The weights are transformers' own. `FusedLlama.of` refuses whatever
it does not know exactly, and the loader compares the logits of both before it lets this one take over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from engine.model.embedding import Embedding
from engine.model.projection import MakeProjection, Projection, join, make_projection, packs

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
class _Norm:
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(module.weight.detach().clone(), float(module.variance_epsilon))


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: _Norm
    qkv: Projection
    query_norm: _Norm | None
    key_norm: _Norm | None
    out: Projection
    post_norm: _Norm
    gate_up: Projection
    down: Projection
    sliding_window: int | None
    scale: float


class FusedLlama:
    """A Llama-family model over the paged cache."""

    def __init__(
        self,
        model: Any,
        attention: PagedAttention,
        layers: list[_Layer],
        max_positions: int,
        make: MakeProjection = make_projection,
    ) -> None:
        config = model.config
        self._attention = attention
        self._layers = layers
        embedding = model.model.embed_tokens.weight.detach()
        # Where the linear layers have copies, the embedding has one too: it alone would keep the whole file mapped.
        copied = make is not make_projection or packs(embedding)
        self._embedding = Embedding(embedding, copied=copied)
        self._norm = _Norm.of(model.model.norm)
        self._head = make(model.lm_head.weight.detach(), _bias(model.lm_head))
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._head_dim: int = model.model.layers[0].self_attn.head_dim
        self._intermediate: int = config.intermediate_size
        positions = torch.arange(max_positions, device=self._embedding.device)[None]
        with torch.inference_mode():
            cos, sin = model.model.rotary_emb(embedding[:1], positions)
        self._cos, self._sin = cos[0], sin[0]

    @classmethod
    def of(
        cls, model: Any, attention: PagedAttention, max_positions: int, make: MakeProjection = make_projection
    ) -> FusedLlama:
        """Take over a transformers model's weights.

        Args:
            model: A `...ForCausalLM` of the family.
            attention: The implementation to call.
            max_positions: Positions to prepare rotary angles for: the longest sequence that will come.
            make: How the weights of linear layers are laid out.

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
            layers = [_fuse(layer, make) for layer in model.model.layers]
        except (AttributeError, ValueError) as error:
            raise NotFusableError(f"one of its layers cannot be joined: {error}") from error
        return cls(model, attention, layers, max_positions, make)

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
        hidden = self._embedding(input_ids)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        num_q, num_kv, dim = self._num_heads, self._num_kv_heads, self._head_dim
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm(hidden)).view(-1, num_q + 2 * num_kv, dim)
            rotated = qkv[:, : num_q + num_kv]
            if layer.query_norm is not None and layer.key_norm is not None:
                keys = layer.key_norm(rotated[:, num_q:])
                rotated = torch.cat((layer.query_norm(rotated[:, :num_q]), keys), 1)
            rotated = _rotate(rotated, cos, sin)
            context = self._attention(
                rotated[:, :num_q],
                rotated[:, num_q:],
                qkv[:, num_q + num_kv :],
                index,
                metadata,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
            )
            context = context.reshape(-1, num_q * dim)
            if index == last:
                # Nothing after the last attention looks at other rows: compute only those that are asked for.
                hidden, context = hidden[rows], context[rows]
            hidden = layer.out(context).add_(hidden)
            gate_up = layer.gate_up(layer.post_norm(hidden))
            gate = F.silu(gate_up[:, : self._intermediate]).mul_(gate_up[:, self._intermediate :])
            hidden = layer.down(gate).add_(hidden)
        return self._head(self._norm(hidden))


def _fuse(layer: Any, make: MakeProjection) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    query_norm = getattr(attention, "q_norm", None)
    key_norm = getattr(attention, "k_norm", None)
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    if getattr(attention.config, "use_sliding_window", True) is False:
        window = None
    return _Layer(
        input_norm=_Norm.of(layer.input_layernorm),
        qkv=join([attention.q_proj, attention.k_proj, attention.v_proj], make),
        query_norm=None if query_norm is None else _Norm.of(query_norm),
        key_norm=None if key_norm is None else _Norm.of(key_norm),
        out=make(attention.o_proj.weight.detach(), _bias(attention.o_proj)),
        post_norm=_Norm.of(layer.post_attention_layernorm),
        gate_up=join([mlp.gate_proj, mlp.up_proj], make),
        down=make(mlp.down_proj.weight.detach(), _bias(mlp.down_proj)),
        sliding_window=window,
        scale=float(attention.scaling),
    )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., 2021) in transformers' half-split form; x `[T, H, D]`, cos and sin `[T, 1, D]`."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos).add_(turned.mul_(sin))


def _bias(linear: Any) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.detach()

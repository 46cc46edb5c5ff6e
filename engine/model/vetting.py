"""Which models the paged cache serves: found out by asking them, not from a list.

A transformers model that goes through the attention hook mostly just works. Those that do not would be silently wrong,
so every model is tried before it is used: what its layers hand over is checked, and the logits of a small chunked
batch over a real (NaN-poisoned) cache are compared with the model's own eager attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.attention import hook
from engine.attention.hook import HookError, LayerShape
from engine.attention.metadata import AttentionMetadata, positions_of
from engine.config import ConfigError
from engine.kv_cache import KVCache
from engine.model.forward import CacheShape, Forward, HookedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Largest relative difference of logits that rounding explains; in half precision routing among experts may flip."""


def check_config(config: Any, name: str) -> None:
    """Refuse what the configuration alone shows to be unservable.

    Args:
        config: transformers' configuration of the model.
        name: Of the model, for the message.

    Raises:
        ConfigError: Says why, in one line.
    """
    kind = f"{name} ({config.model_type})"
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{kind} is an encoder-decoder model: name a decoder-only one")
    text = config.get_text_config(decoder=True)
    for rope in _rope_types(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)):
        if rope in {"longrope", "dynamic"}:
            raise ConfigError(
                f"{kind} is not supported: its rotary positions ({rope}) depend on the longest sequence of a batch, "
                "so requests would change each other's output"
            )
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        raise ConfigError(f"{kind} is not supported: it attends within chunks, which the paged attention does not do")


def _rope_types(parameters: Any) -> Iterator[str]:
    """All rope types in a configuration; some models have one set of parameters per kind of layer."""
    if not isinstance(parameters, dict):
        return
    rope = parameters.get("rope_type") or parameters.get("type")
    if isinstance(rope, str):
        yield rope
    for value in parameters.values():
        yield from _rope_types(value)


def cache_shape(model: HookedModel, name: str) -> CacheShape:
    """Ask the model what it puts into a cache.

    Raises:
        ConfigError: Its layers do not go through the hook, or differ in shape.
    """
    config = model.model.config.get_text_config(decoder=True)
    kind = f"{name} ({config.model_type}) is not supported"
    try:
        with torch.inference_mode():
            calls = model.probe()
    except HookError as error:
        raise ConfigError(f"{kind}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{kind}: trying it failed with {type(error).__name__}: {_one_line(error)}") from error
    if sorted(call.layer for call in calls) != list(range(config.num_hidden_layers)):
        raise ConfigError(
            f"{kind}: {len(calls)} of its {config.num_hidden_layers} layers go through transformers' attention hook"
        )
    if not calls:
        raise ConfigError(f"{kind}: it has no layers")
    first = calls[0]
    for call in calls:
        if (call.num_query_heads, call.num_kv_heads, call.key_dim) != (
            first.num_query_heads,
            first.num_kv_heads,
            first.key_dim,
        ):
            raise ConfigError(f"{kind}: its layers have heads of different number or size")
        if call.key_dim != call.value_dim:
            raise ConfigError(f"{kind}: its keys have {call.key_dim} elements and its values {call.value_dim}")
        if _lacks_window(config, call):
            raise ConfigError(f"{kind}: layer {call.layer} does not hand over its sliding window")
    windows = [call.options.sliding_window or 0 for call in calls]
    window = max(windows) if all(windows) else 0
    return CacheShape(len(calls), first.num_query_heads, first.num_kv_heads, first.key_dim, window)


def _lacks_window(config: Any, call: LayerShape) -> bool:
    """Whether a layer slides by configuration but did not say so; a short trial would not show it in the logits."""
    if call.options.sliding_window is not None or not getattr(config, "sliding_window", None):
        return False
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return bool(kinds[call.layer] == "sliding_attention")
    return getattr(config, "use_sliding_window", True) is not False


class Trial:
    """A small batch with known logits.

    Args:
        model: The transformers model; its attention is set to eager for the reference logits, then to the hook's.
        shape: Of its cache.
        max_positions: Longest sequence that the model or its user allows; the batch stays within it.
        name: Of the model, for messages.

    Raises:
        ConfigError: The model's own logits are no numbers to compare with.
    """

    _LENGTHS = (7, 1, 4)  # a second and a third chunk, a single token, a block boundary between chunks
    _CHUNK = 3
    _BLOCK_SIZE = 2

    def __init__(self, model: Any, shape: CacheShape, max_positions: int, name: str = "the model") -> None:
        self._shape = shape
        self._lengths = [min(n, max_positions) for n in self._LENGTHS]
        self._dtype: torch.dtype = model.dtype
        self._device: torch.device = model.device
        vocab = model.config.get_text_config(decoder=True).vocab_size
        rng = np.random.default_rng(0)
        self._prompts = [rng.integers(0, vocab, size=n) for n in self._lengths]
        model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                rows = [
                    model(input_ids=torch.from_numpy(ids)[None].to(self._device), use_cache=False).logits[0, -1]
                    for ids in self._prompts
                ]
        finally:
            model.set_attn_implementation(hook.ATTENTION_NAME)
        self._expected = torch.stack(rows).float()
        if not bool(self._expected.isfinite().all()):
            raise ConfigError(
                f"{name} is not supported: its own logits in {str(self._dtype).removeprefix('torch.')} are not finite "
                "numbers; use another --dtype, and if they still are not, fetch or convert the model again"
            )

    def difference(self, forward: Forward) -> float:
        """Largest distance of a row of logits from the expected one, relative to that one's length."""
        got = self._run(forward).float()
        error = torch.linalg.vector_norm(got - self._expected, dim=-1)
        relative = error / torch.linalg.vector_norm(self._expected, dim=-1).clamp(min=1e-6)
        return float(relative.nan_to_num(nan=torch.inf).max())

    def accepts(self, difference: float) -> bool:
        """Whether rounding explains a difference."""
        return difference <= _TOLERANCE[self._dtype]

    @torch.inference_mode()
    def _run(self, forward: Forward) -> torch.Tensor:
        """Last logits of each prompt, in chunks, over scattered blocks that hold NaN until they are written."""
        width = -(-max(self._lengths) // self._BLOCK_SIZE)
        cache = KVCache(
            num_blocks=width * len(self._prompts),
            num_layers=self._shape.num_layers,
            num_kv_heads=self._shape.num_kv_heads,
            block_size=self._BLOCK_SIZE,
            head_dim=self._shape.head_dim,
            dtype=self._dtype,
            device=self._device,
            poison=True,
        )
        table = np.arange(cache.num_blocks, dtype=np.int32)[::-1].reshape(len(self._prompts), width)
        last: dict[int, torch.Tensor] = {}
        for start in range(0, max(self._lengths), self._CHUNK):
            live = [i for i, n in enumerate(self._lengths) if n > start]
            ends = np.array([min(self._lengths[i], start + self._CHUNK) for i in live], dtype=np.int32)
            loc = np.concatenate(([0], np.cumsum(ends - start))).astype(np.int32)
            metadata = AttentionMetadata.build(
                query_start_loc=loc, seq_lens=ends, block_table=table[live], kv_cache=cache
            )
            ids = np.concatenate([self._prompts[i][start:end] for i, end in zip(live, ends, strict=True)])
            logits = forward.forward(
                torch.from_numpy(ids).to(self._device),
                torch.from_numpy(positions_of(loc, ends)).to(self._device),
                torch.from_numpy(loc[1:].astype(np.int64) - 1).to(self._device),
                metadata,
            )
            last.update(zip(live, logits, strict=True))
        return torch.stack([last[i] for i in range(len(self._prompts))])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

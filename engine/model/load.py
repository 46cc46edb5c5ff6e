"""From a configuration to an engine that runs a real model."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from engine.attention.choice import choose_attention
from engine.attention.cpu_compile import CompileError
from engine.attention.first_run import first_run
from engine.attention.hook import HookError
from engine.config import ConfigError, EngineConfig
from engine.kv_cache import QUANTISED, SCALE_BYTES, KVCache
from engine.model import freed_memory
from engine.model.checkpoint import find_checkpoint
from engine.model.decode_graphs import DecodeGraphs
from engine.model.device import choose_device, choose_dtype, choose_kv_dtype, set_threads
from engine.model.forward import CacheShape, Forward, HookedModel
from engine.model.fused_llama import FusedLlama, NotFusableError
from engine.model.int8 import make_int8_projection
from engine.model.originals import Originals
from engine.model.pretrained import load_transformers
from engine.model.projection import (
    MakeProjection,
    Original,
    as_it_is,
    borrow,
    make_bfloat16_projection,
    make_exact_projection,
    make_projection,
    multiplies_bfloat16,
)
from engine.model.runner import ModelRunner
from engine.model.tokenizer import TokenizerCodec
from engine.model.vetting import Trial, cache_shape
from engine.overlap import engine_for
from engine.trace.events import ModelInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.attention.metadata import PagedAttention
    from engine.engine import PagedEngine

logger = logging.getLogger("engine")

_NO_LIMIT = 2**31 - 1
_MAX_DIFFERENCE = {"int8": 0.5, "bf16": 0.1}
"""Relative change of a row of logits beyond which narrow weights are refused: models with outlier channels have it."""

_ROUNDED = frozenset({"int8", "bf16"})
"""Forms of the weights that are not the model's own."""


def load(config: EngineConfig, progress: Callable[[str], None], *, title: str, description: str) -> PagedEngine:
    """See `engine.model.load_engine`."""
    set_threads()
    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    attention_name, attention = choose_attention(config.model.attention, device)
    checkpoint = find_checkpoint(config.model.model, progress)
    progress(f"loading {checkpoint.name}")
    model, tokenizer = load_transformers(checkpoint, device, dtype)
    if attention_name == "cpu":
        from engine.attention.cpu import warmup

        progress("compiling the CPU attention (once)")
        try:
            warmup(dtype, choose_kv_dtype(config.cache.kv_dtype, dtype))
        except CompileError as error:
            if config.model.attention == "cpu":
                raise ConfigError(f"the CPU attention cannot be compiled ({error}): use --attention auto") from error
            logger.warning("attention is computed by torch, slowly: its worker cannot be compiled (%s)", error)
            attention_name, attention = choose_attention("reference", device)
    looks = config.model.weights == "int8" or (config.model.weights != "full" and multiplies_bfloat16())
    looks = looks and device.type == "cpu" and dtype == torch.bfloat16
    runner = make_runner(
        model,
        config,
        name=checkpoint.name,
        attention=attention,
        attention_name=attention_name,
        tokenizer=tokenizer,
        original=Originals(model, checkpoint.path) if looks else as_it_is,
    )
    del model
    freed_memory.give_back()
    return engine_for(config, runner, TokenizerCodec(tokenizer), title=title, description=description)


def make_runner(
    model: Any,
    config: EngineConfig,
    *,
    name: str,
    attention: PagedAttention,
    attention_name: str,
    tokenizer: Any = None,
    fuse: bool = True,
    poison: bool = False,
    original: Original = as_it_is,
) -> ModelRunner:
    """A runner over a transformers model that proved to be right; the model's attention is the engine's from here on.

    Args:
        model: Causal language model in eval mode; its device and dtype are the runner's.
        config: For the cache and the seed.
        name: To show.
        attention: The implementation to call.
        attention_name: Its name, to show.
        tokenizer: For the end of output where the model names none.
        fuse: Use the fused forward where there is one for the model.
        poison: Fill the cache with NaN first, for tests.
        original: What the model's matrices were rounded from, where that is known.

    Raises:
        ConfigError: The model cannot be served over the paged cache, or the cache does not fit.
    """
    hooked = HookedModel(model, attention)
    shape = cache_shape(hooked, name)
    if attention_name == "triton":
        attention_name, hooked.attention = _that_runs(attention, shape, config, model)
    limit = _max_positions(model.config.get_text_config(decoder=True))
    max_positions = min(limit, config.scheduler.max_model_len)
    trial = Trial(model, shape, max_positions, name)
    weights = config.model.weights
    if weights in _ROUNDED:
        forward: Forward = _rounded_forward(hooked, trial, name, max_positions, weights, original)
    else:
        make = _maker(weights, model.dtype) if fuse else None
        forward = _choose_forward(hooked, trial, name, max_positions, make, original)
    kv_cache = KVCache(
        num_blocks=config.cache.num_blocks,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        block_size=config.cache.block_size,
        head_dim=shape.head_dim,
        dtype=choose_kv_dtype(config.cache.kv_dtype, model.dtype),
        device=model.device,
        poison=poison,
        num_cpu_blocks=config.cache.num_cpu_blocks,
    )
    graphs = None
    if kv_cache.device.type == "cuda" and config.model.cuda_graphs:
        if attention_name != "triton":
            raise ConfigError(
                f"--cuda-graphs cannot replay the attention {attention_name!r}, which reads lengths on the host: "
                "leave it out, or use --attention triton"
            )
        graphs = DecodeGraphs(forward, kv_cache, config.scheduler.max_num_seqs, max_positions)
    info = ModelInfo(
        name=name,
        architecture=type(model).__name__,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        weights=weights if weights in _ROUNDED else "",
        attention=attention_name,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        num_query_heads=shape.num_query_heads,
        head_dim=shape.head_dim,
        vocab_size=model.config.get_text_config(decoder=True).vocab_size,
        kv_bytes_per_token=kv_cache.block_bytes // kv_cache.block_size,
        kv_dtype=str(kv_cache.dtype).removeprefix("torch."),
        sliding_window=shape.window,
        kv_scale_bytes=SCALE_BYTES if kv_cache.dtype in QUANTISED else 0,
    )
    return ModelRunner(
        forward,
        kv_cache,
        model_info=info,
        max_model_len=limit,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        seed=config.seed,
        graphs=graphs,
    )


def _that_runs(
    attention: PagedAttention, shape: CacheShape, config: EngineConfig, model: Any
) -> tuple[str, PagedAttention]:
    """The GPU's kernels with their name, or else, where nobody asked for them by name, the reference."""
    try:
        first_run(
            attention,
            num_query_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=config.cache.block_size,
            dtype=model.dtype,
            kv_dtype=choose_kv_dtype(config.cache.kv_dtype, model.dtype),
            device=model.device,
        )
    except ConfigError:
        raise
    except Exception as error:  # no C compiler, no headers, a driver that is too old, heads that are too wide
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if config.model.attention == "triton":
            raise ConfigError(f"the attention 'triton' cannot be used here ({reason}): use --attention auto") from error
        logger.warning("attention is computed by torch, slowly: the GPU's kernels cannot be used here (%s)", reason)
        return choose_attention("reference", model.device)
    return "triton", attention


def _maker(weights: str, dtype: torch.dtype) -> MakeProjection:
    makers: dict[str, MakeProjection] = {
        "auto": functools.partial(make_exact_projection, dtype=dtype),
        "full": make_projection,
        "bf16": functools.partial(make_bfloat16_projection, dtype=dtype),
        "int8": functools.partial(make_int8_projection, dtype=dtype),
    }
    return makers[weights]


def _choose_forward(
    hooked: HookedModel,
    trial: Trial,
    name: str,
    max_positions: int,
    make: MakeProjection | None,
    original: Original,
) -> Forward:
    """The fused forward with linear layers of a kind, or else, or without one, transformers' own layers."""
    if make is not None:
        try:
            fused = FusedLlama.of(hooked.model, hooked.attention, max_positions, make, original)
        except NotFusableError as error:
            logger.debug("%s runs through transformers' layers: %s", name, error)
        except torch.OutOfMemoryError:
            logger.warning("%s runs through transformers' layers: joining them takes too much memory", name)
        else:
            if trial.accepts(trial.difference(fused)):
                return fused
            logger.warning("%s: the fused forward differs from transformers and is not used", name)
    try:
        difference = trial.difference(hooked)
    except HookError as error:
        raise ConfigError(f"{name} is not supported: {error}") from error
    if not trial.accepts(difference):
        raise ConfigError(
            f"{name} is not supported: over the paged cache its logits differ from its own by {difference:.1%}"
        )
    return hooked


def _rounded_forward(
    hooked: HookedModel, trial: Trial, name: str, max_positions: int, weights: str, original: Original
) -> Forward:
    """The fused forward with linear layers of another form; the fused forward is tried with the model's own first.

    Those are borrowed: to find out that the forward is the model's, no weight has to be read from the checkpoint nor
    laid out.
    """
    if hooked.model.device.type != "cpu":
        raise ConfigError(f"--weights {weights} runs on the CPU, not on {hooked.model.device}: leave it out")
    try:
        exact = FusedLlama.of(hooked.model, hooked.attention, max_positions, borrow)
    except NotFusableError as error:
        raise ConfigError(
            f"--weights {weights} serves models of the Llama family, which {name} is not ({error}): leave it out"
        ) from error
    difference = trial.difference(exact)
    if not trial.accepts(difference):
        raise ConfigError(
            f"--weights {weights} cannot serve {name}: its logits differ from transformers' by {difference:.1%} before "
            "any weight is rounded; leave it out"
        )
    make = _maker(weights, hooked.model.dtype)
    try:
        forward = FusedLlama.of(hooked.model, hooked.attention, max_positions, make, original)
    except CompileError as error:
        raise ConfigError(f"--weights {weights} cannot be compiled here ({error}): leave it out") from error
    difference = trial.difference(forward)
    logger.info("%s weights change the logits of a short trial by %.1f%%", weights, 100 * difference)
    if difference > _MAX_DIFFERENCE[weights]:
        raise ConfigError(
            f"--weights {weights} is too coarse for {name}: its logits change by {difference:.0%}; leave it out"
        )
    return forward


def _max_positions(config: Any) -> int:
    for attribute in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        limit = getattr(config, attribute, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return _NO_LIMIT


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """As `generate` has them: of the generation settings, or else the model's, or else the tokenizer's."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset()

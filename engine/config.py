"""The engine's settings, validated where they are made and frozen from then on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DEFAULT_MODEL = "smollm2"

DType = Literal["auto", "bfloat16", "float16", "float32"]
Weights = Literal["auto", "full", "bf16", "int8"]
KVDType = Literal["auto", "bf16", "fp8", "int8"]
Preemption = Literal["recompute", "swap", "auto"]
Policy = Literal["paged", "contiguous", "static"]


class ConfigError(ValueError):
    """A setting that cannot work. Its text is one line: what, to what, and what to do next."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged cache: fixed blocks, taken on demand from one pool.

    Attributes:
        block_size: Tokens a block holds.
        num_blocks: Physical blocks in the pool.
        prefix_caching: Whether full blocks are shared between requests with an equal prefix.
        num_cpu_blocks: Blocks in the host's memory, for contents that have to leave the pool.
        kv_dtype: Of keys and values: the model's own type, bfloat16, or 8 bits (float8 e4m3, int8) with a scale for
            each token and head.
    """

    block_size: int = 16
    num_blocks: int = 512
    prefix_caching: bool = True
    num_cpu_blocks: int = 0
    kv_dtype: KVDType = "auto"

    def __post_init__(self) -> None:
        _require(self.block_size >= 1, f"block size {self.block_size} is not possible: a block holds at least 1 token")
        _require(self.block_size <= 4096, f"block size {self.block_size} is not possible: the largest is 4096")
        _require(
            self.num_blocks >= 1,
            f"a pool of {self.num_blocks} blocks is too small: it needs at least 1 block (--num-blocks)",
        )
        _require(
            self.num_blocks <= 2**31 - 1, f"a pool of {self.num_blocks} blocks is too large: the most is {2**31 - 1}"
        )
        _require(
            0 <= self.num_cpu_blocks <= 2**31 - 1,
            f"a CPU pool of {self.num_cpu_blocks} blocks is not possible: use 0 (none) to {2**31 - 1} (--cpu-blocks)",
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one iteration.

    Attributes:
        max_num_seqs: Requests running at once.
        max_num_batched_tokens: Tokens computed in one iteration, prefill and decode together.
        max_prefill_chunk: Tokens of one prompt computed in one iteration; 0 means only the budget limits it.
        max_model_len: Longest request, prompt and output together, in tokens.
        preemption: What happens to the youngest request under pressure: its blocks are computed again later, or copied
            to the CPU pool where that has room, or whichever costs less. With another policy than `paged`,
            nobody is preempted.
        policy: `paged`, or one of the older ways in `engine.baselines`; those share no prefixes and fork nothing.
        async_scheduling: Whether the next iteration is scheduled while the device computes one (`engine.overlap`).
            None chooses by itself: off, as long as what it gains has not been measured on a card.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int = 0
    max_model_len: int = 2048
    preemption: Preemption = "recompute"
    policy: Policy = "paged"
    async_scheduling: bool | None = None

    def __post_init__(self) -> None:
        _require(self.max_num_seqs >= 1, f"--max-num-seqs {self.max_num_seqs} is not possible: use at least 1")
        _require(
            self.max_num_batched_tokens >= 1,
            f"--max-num-batched-tokens {self.max_num_batched_tokens} is not possible: use at least 1",
        )
        _require(
            self.max_prefill_chunk >= 0,
            f"--max-prefill-chunk {self.max_prefill_chunk} is not possible: use 0 (the budget alone) or more",
        )
        _require(self.max_model_len >= 2, f"--max-model-len {self.max_model_len} is not possible: use at least 2")
        _require(
            self.policy != "static" or not self.async_scheduling,
            "--policy static asks who has ended before it decides: use --no-async-scheduling",
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model runs, and where.

    Attributes:
        model: `smollm2` for the embedded default, a Hugging Face id, or a folder.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        dtype: Of weights and activations; `auto` is bfloat16 where the machine computes it natively, else float32.
        attention: `auto`, or the name of one implementation in `engine.attention`.
        weights: Of linear layers. `auto` computes with the model's own and holds them, on a CPU, in the fewest bytes
            that lose nothing (of a bfloat16 model those that it was rounded from, where the processor multiplies
            bfloat16); `full` in the type's bytes; `bf16` rounds them to bfloat16 and `int8` multiplies 8-bit or
            4-bit codes of them with inputs of 8 or 16 bits (both on a CPU).
        cuda_graphs: Whether decode steps on a CUDA device are captured once and replayed.
    """

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: DType = "auto"
    attention: Literal["auto", "reference", "cpu", "triton"] = "auto"
    cuda_graphs: bool = False
    weights: Weights = "auto"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything `PagedEngine` needs to know."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        _require(
            self.scheduler.preemption != "swap" or self.cache.num_cpu_blocks > 0,
            "--preemption swap needs a CPU pool to swap to: give it blocks (--cpu-blocks N)",
        )
        _require(
            self.scheduler.policy == "paged" or self.cache.num_cpu_blocks == 0,
            f"--policy {self.scheduler.policy} has no use for a CPU pool: leave --cpu-blocks out",
        )

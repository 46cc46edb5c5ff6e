"""The structs of a trace: what the engine says about itself, once per iteration.

A trace is a `Header`, then `RequestArrived` and `StepTrace` in order (a request's arrival comes before the first step
that mentions it), with a `Keyframe` now and then in recordings. `docs/trace.md` is the reader's guide; the fold is
`engine.trace.state.PoolState`. Bump `SCHEMA_VERSION` when a reader of the old form would misread the new one.
"""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple

import msgspec

SCHEMA_VERSION = 1

NO_BLOCK = -1
"""Stands for "no block" in a table, and for a slot that is not written."""

NO_REQUEST = -1
"""Stands for "no request" where a block operation or an owner has none."""


class Op(enum.IntEnum):
    """What happened to a block. Each operation is a row of four integers, `BlockOp`, applied in the order given."""

    ALLOCATE = 0
    """(block, request, logical): taken from the free queue (its head, where memory is paged); its old content is gone;
    one reference."""
    SHARE = 1
    """(block, request, logical): a prefix hit or a fork, one reference more; a free block leaves the free queue."""
    FILL = 2
    """(block, request, n): now n of its slots hold keys and values, counted from the block's start."""
    HASH = 3
    """(block, key, 0): full, its content is known under this key and can be found."""
    RELEASE = 4
    """(block, request, 0): one reference less; at none it joins the tail of the free queue, still cached if hashed."""
    EVICT = 5
    """(block, key, 0): a cached content is lost, because the block is about to be allocated again."""
    COPY = 6
    """(source, destination, n): copy on write of the first n slots."""
    SWAP_OUT = 7
    """(block, cpu_block, request): content copied to the CPU pool, for a request or, with NO_REQUEST, since the cached
    content is about to be evicted; references to the block stay as they are."""
    SWAP_IN = 8
    """(cpu_block, block, request): content moved back; the CPU block is free then."""
    DROP = 9
    """(cpu_block, request, key): a content in the CPU pool is let go, a request's or, with NO_REQUEST, an offloaded
    one."""


class BlockOp(NamedTuple):
    """One block operation. What a, b and c are depends on `op`; see `Op`."""

    op: int
    a: int
    b: int
    c: int


class Phase(enum.IntEnum):
    """What a request's tokens in one iteration are for."""

    PREFILL = 0
    """Its prompt, or a chunk of it."""
    DECODE = 1
    """The one token sampled before."""
    RECOMPUTE = 2
    """Tokens that were computed once and lost to a preemption."""
    OVERRUN = 3
    """Computed in vain: scheduled before it was known that the request had ended; its token is thrown away."""


class DecisionKind(enum.IntEnum):
    """What the scheduler decided about a request."""

    ADMITTED = 0
    WAITS = 1
    PREEMPTED = 2
    REFUSED = 3
    RESUMED = 4
    """Admitted again after a preemption."""
    FAILED = 5
    """Ended because it outgrew the pool alone, or because its step failed."""


class Reason(enum.StrEnum):
    """Why. `engine.trace.explain` makes a sentence of a decision; the numbers each one carries are named here.

    Who is admitted or resumed behind the beginning of a sliding window has `behind` besides: the places in front of its
    table that hold no block. What comes back from the CPU pool for FITS is told as `swapped`, in blocks.
    """

    FITS = "fits"
    """needs, free, cached_tokens: new blocks it takes, free blocks before, tokens found in the prefix cache."""
    SWAPPED_IN = "swapped_in"
    """needs, free, cached_tokens, swapped: it goes on where it was; so many blocks were brought back."""
    FORKED = "forked"
    """parent, shared, cached_tokens: split off a running request, whose blocks with so many tokens it shares."""
    NO_BLOCKS = "no_blocks"
    """needs, free: blocks that the known tokens need, and how many are free."""
    NO_HOLE = "no_hole"
    """needs, largest_hole, free: blocks in a row that it reserves, the most free ones in a row, and all free ones."""
    BATCH_RUNNING = "batch_running"
    """running, batch: of the static batch, how many still run, and how many it had."""
    SEQUENCE_CAP = "sequence_cap"
    """running, limit: max_num_seqs."""
    TOKEN_BUDGET = "token_budget"
    """scheduled, limit: max_num_batched_tokens."""
    BEHIND = "behind"
    """ahead: first come, first served; it waits behind this request."""
    GAVE_WAY = "gave_way"
    """needs, free, to, released: the request `to` needed blocks; this one, the youngest, released its own."""
    GAVE_WAY_TO_ITSELF = "gave_way_to_itself"
    """needs, free, released: it was the youngest itself."""
    SWAPPED_OUT = "swapped_out"
    """needs, free, to, released, swapped: as GAVE_WAY, and so many blocks were copied to the CPU pool."""
    SWAPPED_OUT_ITSELF = "swapped_out_itself"
    """needs, free, released, swapped: as GAVE_WAY_TO_ITSELF."""
    NEVER_FITS = "never_fits"
    """needs, pool: blocks the prompt and its first new token need, and how many the pool has."""
    RESERVATION_NEVER_FITS = "reservation_never_fits"
    """needs, pool: the prompt and all new tokens that it may ask for need more blocks than the pool has."""
    TOO_LONG = "too_long"
    """tokens, limit: max_model_len."""
    EMPTY_PROMPT = "empty_prompt"
    PARENT_ENDED = "parent_ended"
    """parent: it was to be forked from a request that has ended."""
    OUTGREW_POOL = "outgrew_pool"
    """needs, pool: alone in the pool, and it still needs more."""
    STEP_FAILED = "step_failed"


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model behind the cache.

    Attributes:
        dtype: Of weights and activations.
        weights: `int8` where linear layers have 8-bit weights and inputs; else empty.
        kv_bytes_per_token: 2 x layers x kv_heads x (head_dim x bytes of one element + kv_scale_bytes), keys and values.
        kv_dtype: Of the cache's elements; empty where it is `dtype` (traces older than this field).
        sliding_window: Positions that no layer looks further back than, 0 where a layer sees all. Blocks wholly behind
            it are released while their request runs.
        kv_scale_bytes: Of the scale that a quantised cache keeps for each token and head, of keys and values each.
    """

    name: str
    architecture: str
    device: str
    dtype: str
    attention: str
    num_layers: int
    num_kv_heads: int
    num_query_heads: int
    head_dim: int
    vocab_size: int
    kv_bytes_per_token: int
    weights: str = ""
    kv_dtype: str = ""
    kv_scale_bytes: int = 0
    sliding_window: int = 0


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """The first message of a trace.

    Attributes:
        source: Who made it.
        provenance: `measured` on a real engine, `simulated` without a model, or `inferred` from outside; shown as a
            badge.
        policy: `paged`, or the older way that was run instead: `contiguous`, `static`.
        async_scheduling: Whether the next step is scheduled while one is computed: a step's decisions and allocations
            are then mostly about the next one's batch.
        started_at: Unix time in seconds.
    """

    schema_version: int = SCHEMA_VERSION
    producer: str = "kvtui"
    source: Literal["engine", "simulator"] = "engine"
    provenance: Literal["measured", "simulated", "inferred"] = "measured"
    title: str = ""
    description: str = ""
    model: ModelInfo
    block_size: int
    num_blocks: int
    num_cpu_blocks: int = 0
    prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    max_model_len: int
    preemption: str
    policy: str = "paged"
    async_scheduling: bool = False
    started_at: float


class RequestArrived(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """A request came in, whatever becomes of it.

    Attributes:
        time_ns: Since the trace began.
        prompt_pieces: The text of each prompt token; joined, the prompt.
        parent: The request it was forked from, or NO_REQUEST.
    """

    request: int
    name: str
    time_ns: int
    prompt_token_ids: list[int]
    prompt_pieces: list[str]
    max_tokens: int
    temperature: float
    parent: int = NO_REQUEST


class BatchMember(NamedTuple):
    """A request in one iteration: num_scheduled tokens, computed after computed_before others."""

    request: int
    phase: int
    computed_before: int
    num_scheduled: int


class NewToken(NamedTuple):
    """A sampled token and the text that it completed (empty in the middle of a character)."""

    request: int
    token_id: int
    text: str


class Finish(NamedTuple):
    """The end of a request: a `FinishReason` value and, where it went wrong, one line that says why."""

    request: int
    reason: str
    message: str


class Decision(NamedTuple):
    """One decision of the scheduler, with the numbers that it was taken on.

    A request that goes on waiting for the same reason and numbers is not repeated at every step.
    """

    kind: int
    request: int
    reason: str
    numbers: dict[str, int]


class Counters(NamedTuple):
    """Levels after the step, and totals since the trace began."""

    running: int
    waiting: int
    preempted: int
    """Of the waiting ones, how many had run before."""
    used_blocks: int
    cached_blocks: int
    """Free blocks whose content can still be found."""
    free_blocks: int
    """Free blocks without content; used + cached + free = the pool."""
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    generated_tokens: int


class StepTrace(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """Everything that one iteration did, immutable, made once.

    Attributes:
        index: 0, 1, 2, ...
        start_ns: Since the trace began.
        schedule_ns: Deciding who runs.
        execute_ns: The forward.
        sample_ns: Choosing the tokens.
        update_ns: Bookkeeping after it, detokenising included.
        batch: Who was in it; empty when only aborts or refusals happened. Of a forward that failed, each with
            num_scheduled 0; likewise where it was thrown away, because it went on from one that failed.
        ops: Block operations in order (`BlockOp` rows).
    """

    index: int
    start_ns: int
    schedule_ns: int
    execute_ns: int
    sample_ns: int
    update_ns: int
    batch: list[BatchMember]
    ops: list[BlockOp]
    tokens: list[NewToken]
    finished: list[Finish]
    decisions: list[Decision]
    counters: Counters


TraceMessage = Header | RequestArrived | StepTrace

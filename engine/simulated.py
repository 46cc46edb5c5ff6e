"""The whole engine without a model: real scheduling, real blocks, made-up tokens.

`SimulatedRunner` stands where a model would, and is as strict as one about the cache. It keeps a memory with one cell
per slot, writes each token's cell through the block table and reads the sequence back through it to find the next
token. A cell holds a hash chained over everything before it, as keys and values depend on everything before them. So
a wrong block, a stale table or a cell read before it was written changes the tokens, or ends the request by name.
"""

from __future__ import annotations

import codecs
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.deferred import DeferredStep
from engine.overlap import engine_for
from engine.runner import UNKNOWN_TOKEN, RunnerError
from engine.trace.events import ModelInfo, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.config import KVDType
    from engine.core.scheduler_output import BlockCopy, ScheduledRequest, SchedulerOutput
    from engine.engine import PagedEngine
    from engine.request import Request

_MASK: Final = 2**64 - 1
_UNWRITTEN: Final = 0

_NUM_BYTES: Final = 256
EOS_TOKEN_ID: Final = _NUM_BYTES
_FIRST_WORD: Final = EOS_TOKEN_ID + 1

_TEXT: Final = (
    "the of and to in is that it for as with on by are this from at or be an not which can all their has have one "
    "each block page cache token request memory table pool queue free full shared prefix hash step batch key value "
    "head tail layer model prompt engine scheduler written read found kept lost taken again first last next when then "
    "while after before until where what who why how many few more less most small large long short fast slow new old "
    "same other whole part line word name number time place order room work runs waits holds needs gives takes makes "
    "fills shares evicts releases grows ends begins follows answers asks says shows counts"
)
_WORDS: Final = tuple(_TEXT.split())
_PUNCTUATION: Final = (".", ",", "\n", " ")
_WIDE: Final = tuple(text.encode() for text in ("é", "→", "字", "🙂"))

_TOKEN_BYTES: Final = (
    *(bytes([i]) for i in range(_NUM_BYTES)),
    b"<eos>",
    *(f" {word}".encode() for word in _WORDS),
)
_ID_OF_WORD: Final = {text.decode(): i for i, text in enumerate(_TOKEN_BYTES) if i >= _FIRST_WORD}
_UNITS: Final = re.compile(r" ?[A-Za-z]+|.", re.DOTALL)


def _mix(value: int) -> int:
    """A well-mixed 64-bit number of another (the finaliser of SplitMix64, Steele et al., 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class SimulatedStream:
    """Text of simulated tokens as they come; the bytes of half a character are held back."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        return self._decoder.decode(_TOKEN_BYTES[token_id])

    def flush(self) -> str:
        """A replacement character, if the output ended within a character."""
        return self._decoder.decode(b"", final=True)


class SimulatedCodec:
    """Common words are one token, everything else a token per byte of its UTF-8 form; any text comes back whole."""

    vocab_size: Final = len(_TOKEN_BYTES)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; lone surrogates, which no UTF-8 has, become `?`."""
        token_ids: list[int] = []
        for unit in _UNITS.findall(text):
            word = _ID_OF_WORD.get(unit)
            if word is None:
                token_ids += unit.encode("utf-8", "replace")
            else:
                token_ids.append(word)
        return token_ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation, a line a message, up to where the assistant answers."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant:")

    def stream(self, prompt_token_ids: Sequence[int]) -> SimulatedStream:
        """A stream for an output; what the prompt was makes no difference here."""
        return SimulatedStream()

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token completes; joined, the whole text."""
        stream = SimulatedStream()
        pieces = [stream.push(token_id) for token_id in token_ids]
        if pieces:
            pieces[-1] += stream.flush()
        return pieces


SIMULATED_MODEL = ModelInfo(
    name="simulated",
    architecture="none: tokens are made up",
    device="none",
    dtype="bfloat16",
    attention="none",
    num_layers=30,
    num_kv_heads=3,
    num_query_heads=9,
    head_dim=64,
    vocab_size=SimulatedCodec.vocab_size,
    kv_bytes_per_token=2 * 30 * 3 * 64 * 2,
)
"""What the simulated runner says of its model: the shapes of a small real one, so that the formulas give real sizes."""

_KV_DTYPES: dict[KVDType, tuple[str, int, int]] = {
    "auto": ("bfloat16", 2, 0),
    "bf16": ("bfloat16", 2, 0),
    "fp8": ("float8_e4m3fn", 1, 4),
    "int8": ("int8", 1, 4),
}


def _model_with(kv_dtype: KVDType) -> ModelInfo:
    """The simulated model with the sizes of such a cache."""
    name, element_bytes, scale_bytes = _KV_DTYPES[kv_dtype]
    model = SIMULATED_MODEL
    return msgspec.structs.replace(
        model,
        kv_dtype=name,
        kv_scale_bytes=scale_bytes,
        kv_bytes_per_token=2 * model.num_layers * model.num_kv_heads * (model.head_dim * element_bytes + scale_bytes),
    )


class SimulatedRunner:
    """Next tokens that are a pure function of the tokens so far and a seed, found through the paged memory.

    Attributes:
        memory: uint64 [num_blocks * block_size]; 0 is a cell that nobody has written.
        cpu_memory: The same of the CPU pool.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        step_seconds: float = 0.0,
        seconds_per_token: float = 0.0,
        eos_rate: float = 0.0,
        max_model_len: int = 2**31 - 1,
        sliding_window: int = 0,
    ) -> None:
        """Make one for a pool of the configured size.

        Args:
            config: Block size, number of blocks, seed.
            step_seconds: Time that every step takes at least.
            seconds_per_token: And for each token in its batch.
            eos_rate: Share of tokens that are the end of the output, 0 to 1.
            max_model_len: As a model's positions would limit it.
            sliding_window: Cells that the next token is found from, at least 2; 0 for all.
        """
        self.block_size = config.cache.block_size
        self.memory = np.zeros(config.cache.num_blocks * self.block_size, dtype=np.uint64)
        self.cpu_memory = np.zeros(config.cache.num_cpu_blocks * self.block_size, dtype=np.uint64)
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset({EOS_TOKEN_ID})
        self.last_execute_ns = 0
        self.last_sample_ns = 0
        self._seed = config.seed
        self._step_seconds = step_seconds
        self._seconds_per_token = seconds_per_token
        self._eos_below = int(eos_rate * 2**32)
        self._weights = np.arange(1, 1025, 2, dtype=np.uint64)
        self._window = sliding_window
        self._launched: _LaunchedStep | None = None
        self._done_at_ns = 0
        self.model_info = msgspec.structs.replace(_model_with(config.cache.kv_dtype), sliding_window=sliding_window)

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        """Write the batch's cells, then read each sequence that samples back, as far as its window goes.

        Raises:
            RunnerError: a request reads a cell that was never written, or has no token to compute.
        """
        began = time.perf_counter_ns()
        for share in output.scheduled:
            self._write(share)
        wrote = time.perf_counter_ns()
        tokens = [self._next_token(share, share.request) if share.samples else None for share in output.scheduled]
        tokens += [self._next_token(output.scheduled[place], request) for place, request in output.forks]
        sampled = time.perf_counter_ns()
        done_at = self._done_at_ns or began + self.duration_ns(output)
        if done_at > sampled:
            time.sleep((done_at - sampled) / 1e9)
        self.last_sample_ns = sampled - wrote
        self.last_execute_ns = time.perf_counter_ns() - began - self.last_sample_ns
        return tokens

    def launch(self, output: SchedulerOutput) -> DeferredStep:
        """See `LaunchingRunner.launch`; `execute` is called when the step is waited for.

        The time that the step takes begins now, or where that of the one launched before it ends.
        """
        step = self._launched = _LaunchedStep(self, output, self._launched)
        return step

    def run_launched(self, output: SchedulerOutput, done_at_ns: int) -> list[int | None]:
        """Execute a step that was launched, which is done at that time."""
        self._done_at_ns = done_at_ns
        try:
            return self.execute(output)
        finally:
            self._done_at_ns = 0

    def duration_ns(self, output: SchedulerOutput) -> int:
        """Time that a step takes at least."""
        return int((self._step_seconds + self._seconds_per_token * output.num_batched_tokens) * 1e9)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Move cells as a model's cache would its rows."""
        if self._launched is not None:
            self._launched.run()
        memory = self.memory.reshape(-1, self.block_size)
        cpu_memory = self.cpu_memory.reshape(-1, self.block_size)
        for op, source, destination in copies:
            read, written = memory, memory
            if op == Op.SWAP_OUT:
                written = cpu_memory
            elif op == Op.SWAP_IN:
                read = cpu_memory
            written[destination] = read[source]

    def preemption_costs(self) -> tuple[float, float]:
        """Made up, such that blocks of a few tokens are not worth copying."""
        return 1500.0, 1000.0 + self._seconds_per_token * 1e9

    def forget(self, request_id: int) -> None:
        """Nothing is kept for a request."""

    def _write(self, share: ScheduledRequest) -> None:
        memory, size, table = self.memory, self.block_size, share.block_ids
        position = share.computed_before
        if share.num_scheduled < 1:
            # A model has no logits where it computes no token.
            request_id = share.request.request_id
            raise RunnerError(f"request {request_id} is in the batch without a token to compute", [request_id])
        before = 1
        if position:
            block = table[(position - 1) // size]
            before = int(memory[block * size + (position - 1) % size])
            if block < 0 or before == _UNWRITTEN:
                raise self._unwritten(share, position - 1)
        for token_id in share.token_ids:
            before = _mix(before ^ _mix(token_id)) or 1
            memory[table[position // size] * size + position % size] = before
            position += 1

    def _next_token(self, share: ScheduledRequest, request: Request) -> int:
        size = self.block_size
        num_tokens = share.computed_before + share.num_scheduled
        first = max(0, num_tokens - self._window) if self._window else 0
        skipped = first // size * size
        table = np.asarray(share.block_ids[first // size : -(-num_tokens // size)])
        if (table < 0).any():
            raise self._unwritten(share, skipped + size * int(np.argmin(table)))
        cells = self.memory.reshape(-1, size)[table].reshape(-1)[first - skipped : num_tokens - skipped]
        if not cells.all():
            raise self._unwritten(share, first + int(np.argmin(cells != _UNWRITTEN)))
        if len(self._weights) < num_tokens:
            self._weights = np.arange(1, 4 * num_tokens, 2, dtype=np.uint64)
        # Odd weights, so that no cell can change without changing the sum (modulo 2^64).
        content = int((cells * self._weights[first:num_tokens]).sum(dtype=np.uint64))
        params = request.params
        seed = self._seed
        if params.temperature > 0:
            seed = _mix(seed) ^ (request.request_id if params.seed is None else _mix(params.seed))
        return self._token_of(_mix(content ^ _mix(seed & _MASK)), request.tokens(max(0, num_tokens - 3), num_tokens))

    def _token_of(self, chance: int, last: list[int]) -> int:
        """A token for a random number: the rest of a character that was begun, else mostly a word."""
        for length in range(len(last), 0, -1):
            if all(token_id < _NUM_BYTES for token_id in last[-length:]):
                begun = bytes(last[-length:])
                for wide in _WIDE:
                    if length < len(wide) and wide.startswith(begun):
                        return wide[length]
        if chance >> 32 < self._eos_below:
            return EOS_TOKEN_ID
        kind = chance % 32
        chance //= 32
        if kind == 0:
            return _WIDE[chance % len(_WIDE)][0]
        if kind < 4:
            return ord(_PUNCTUATION[chance % len(_PUNCTUATION)])
        return _FIRST_WORD + chance % len(_WORDS)

    def _unwritten(self, share: ScheduledRequest, position: int) -> RunnerError:
        request_id = share.request.request_id
        return RunnerError(
            f"request {request_id} reads position {position} of its cache, block "
            f"{share.block_ids[position // self.block_size]}, which nobody has written",
            [request_id],
        )


class _LaunchedStep(DeferredStep):
    """A step of a `SimulatedRunner`, with everything of its requests as it was when the step was launched."""

    def __init__(self, runner: SimulatedRunner, output: SchedulerOutput, before: _LaunchedStep | None) -> None:
        super().__init__(self._execute, before)
        self.sampled: dict[int, int | None] = {}
        begins_ns = max(time.perf_counter_ns(), before.done_at_ns if before is not None else 0)
        self.done_at_ns: int = begins_ns + runner.duration_ns(output)
        self._runner = runner
        self._output = replace(output, scheduled=[_as_it_is(share) for share in output.scheduled])
        self._sampled_before = before.sampled if before is not None else {}

    def _execute(self) -> list[int | None]:
        for share in self._output.scheduled:
            request = share.request
            if request.output_token_ids[-1:] == [UNKNOWN_TOKEN]:
                token_id = self._sampled_before.get(request.request_id)
                if token_id is None:
                    raise RunnerError(f"the step before brought no token for request {request.request_id}")
                request.output_token_ids[-1] = token_id
        tokens = self._runner.run_launched(self._output, self.done_at_ns)
        for share, token_id in zip(self._output.scheduled, tokens, strict=False):
            self.sampled[share.request.request_id] = token_id
        return tokens


def _as_it_is(share: ScheduledRequest) -> ScheduledRequest:
    request = replace(share.request, output_token_ids=share.request.output_token_ids.copy())
    return share._replace(request=request, block_ids=share.block_ids.copy())


def simulated_engine(
    config: EngineConfig | None = None,
    *,
    title: str = "",
    description: str = "",
    step_seconds: float = 0.0,
    seconds_per_token: float = 0.0,
    eos_rate: float = 0.0,
    sliding_window: int = 0,
) -> PagedEngine:
    """A `PagedEngine` that needs no model; its traces say `simulated`."""
    config = config or EngineConfig()
    runner = SimulatedRunner(
        config,
        step_seconds=step_seconds,
        seconds_per_token=seconds_per_token,
        eos_rate=eos_rate,
        sliding_window=sliding_window,
    )
    return engine_for(
        config,
        runner,
        SimulatedCodec(),
        title=title,
        description=description,
        source="simulator",
        provenance="simulated",
    )

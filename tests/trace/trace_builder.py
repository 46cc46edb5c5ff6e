"""Traces for tests: crafted operation by operation, or made by the engine without a model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import (
    BatchMember,
    BlockOp,
    Counters,
    Decision,
    DecisionKind,
    Finish,
    Header,
    ModelInfo,
    NewToken,
    Op,
    Phase,
    Reason,
    RequestArrived,
    StepTrace,
)
from engine.trace.state import PoolState

MODEL = ModelInfo(
    name="tiny",
    architecture="LlamaForCausalLM",
    device="cpu",
    dtype="float32",
    attention="reference",
    num_layers=2,
    num_kv_heads=1,
    num_query_heads=3,
    head_dim=8,
    vocab_size=1000,
    kv_bytes_per_token=128,
)


def make_header(**changes) -> Header:
    header = Header(
        title="a title",
        description="what it shows",
        model=MODEL,
        block_size=4,
        num_blocks=8,
        num_cpu_blocks=2,
        prefix_caching=True,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_prefill_chunk=0,
        max_model_len=64,
        preemption="recompute",
        started_at=1_700_000_000.5,
    )
    return msgspec.structs.replace(header, **changes)


def allocate(block, request, logical):
    return BlockOp(Op.ALLOCATE, block, request, logical)


def share(block, request, logical):
    return BlockOp(Op.SHARE, block, request, logical)


def fill(block, request, n):
    return BlockOp(Op.FILL, block, request, n)


def hashed(block, key):
    return BlockOp(Op.HASH, block, key, 0)


def release(block, request):
    return BlockOp(Op.RELEASE, block, request, 0)


def evict(block, key):
    return BlockOp(Op.EVICT, block, key, 0)


def admitted(request, cached=0, kind=DecisionKind.ADMITTED):
    return Decision(kind, request, Reason.FITS, {"needs": 1, "free": 8, "cached_tokens": cached})


def arrived(request, num_tokens=4, **changes):
    message = RequestArrived(
        request=request,
        name=f"request {request}",
        time_ns=1000 + request,
        prompt_token_ids=list(range(10, 10 + num_tokens)),
        prompt_pieces=[f" w{i}" for i in range(num_tokens)],
        max_tokens=8,
        temperature=0.5,
    )
    return msgspec.structs.replace(message, **changes)


@dataclass
class TraceBuilder:
    """Builds a trace step by step, with counters that fit, and folds it as it goes."""

    header: Header = field(default_factory=make_header)
    messages: list = field(default_factory=list)

    def __post_init__(self):
        self.state = PoolState(self.header)

    def arrive(self, *requests, num_tokens=4):
        for request in requests:
            self._take(arrived(request, num_tokens))

    def step(self, *ops, batch=(), tokens=(), finished=(), decisions=(), **counters):
        index = self.state.step + 1
        step = StepTrace(
            index=index,
            start_ns=100 * index,
            schedule_ns=11,
            execute_ns=50,
            sample_ns=12,
            update_ns=13,
            batch=[BatchMember(*member) for member in batch],
            ops=list(ops),
            tokens=[NewToken(*token) for token in tokens],
            finished=[Finish(*finish) for finish in finished],
            decisions=list(decisions),
            counters=Counters(0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        )
        scratch = self.state.copy()
        scratch.apply(step)
        levels = {"used_blocks": scratch.used, "cached_blocks": scratch.cached, "free_blocks": scratch.free}
        step = msgspec.structs.replace(step, counters=step.counters._replace(**(levels | counters)))
        self._take(step)
        return step

    def prefill(self, request, blocks, num_tokens, text=" go"):
        """Admit a request, give it blocks and compute its prompt."""
        size = self.header.block_size
        ops = [allocate(block, request, place) for place, block in enumerate(blocks)]
        ops += [fill(b, request, min(size, num_tokens - size * at)) for at, b in enumerate(blocks)]
        return self.step(
            *ops,
            batch=[(request, Phase.PREFILL, 0, num_tokens)],
            tokens=[(request, 7, text)],
            decisions=[admitted(request)],
        )

    def _take(self, message):
        self.messages.append(message)
        self.state.apply(message)


def simulated_trace(
    seed=0, num_requests=30, num_blocks=24, block_size=4, sinks=(), each_step=None, num_cpu_blocks=0, sliding_window=0
):
    """The header and messages of a real schedule under pressure: shared prefixes, preemptions, aborts, refusals.

    `sinks` are called with the header and give sinks; `each_step` is called after every step. With a CPU pool requests
    are swapped.
    """
    config = EngineConfig(
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=40,
            max_prefill_chunk=16,
            max_model_len=90,
            preemption="swap" if num_cpu_blocks else "recompute",
        ),
        seed=seed,
    )
    engine = simulated_engine(config, title="simulated", eos_rate=0.02, sliding_window=sliding_window)
    messages = []
    engine.add_sink(messages.append)
    for sink in sinks:
        engine.add_sink(sink(engine.header))
    rng = random.Random(seed)
    shared = "the page of the block that all share first "
    known = []
    while num_requests or engine.has_work:
        while num_requests and rng.random() < 0.4:
            num_requests -= 1
            prompt = rng.choice((shared, "")) + " ".join(rng.choice(("token", "zé", "🙂", "x")) for _ in range(8))
            long = rng.random() < 0.05
            params = SamplingParams(max_tokens=rng.randint(1, 30), temperature=rng.choice((0.0, 1.0)))
            known.append(engine.add_request(prompt * (20 if long else 1), params, name=f"r\x1b[31m{num_requests}"))
        if known and rng.random() < 0.05:
            engine.abort(rng.choice(known))
        before = len(messages)
        engine.step()
        if each_step is not None and any(isinstance(message, StepTrace) for message in messages[before:]):
            each_step()
    return messages[0], messages[1:]

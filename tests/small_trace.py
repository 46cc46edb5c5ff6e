"""Hand-made traces of a few steps, for tests of what is drawn over time."""

from __future__ import annotations

from engine.trace.events import (
    BatchMember,
    BlockOp,
    Counters,
    Finish,
    Header,
    ModelInfo,
    NewToken,
    RequestArrived,
    StepTrace,
)
from engine.trace.state import PoolState
from kvtui.history import History

MODEL = ModelInfo(
    name="m",
    architecture="a",
    device="cpu",
    dtype="bfloat16",
    attention="reference",
    num_layers=2,
    num_kv_heads=3,
    num_query_heads=6,
    head_dim=8,
    vocab_size=100,
    kv_bytes_per_token=2 * 2 * 3 * 8 * 2,
)
HEADER = Header(
    model=MODEL,
    block_size=4,
    num_blocks=10,
    prefix_caching=True,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_prefill_chunk=0,
    max_model_len=50,
    preemption="recompute",
    started_at=0.0,
)
LEVELS = Counters(1, 0, 0, 3, 2, 5, 0, 0, 0, 0)


def step(index, batch=(), *, start_ns=None, ops=(), tokens=(), finished=(), decisions=(), counters=LEVELS):
    return StepTrace(
        index,
        index * 10_000_000 if start_ns is None else start_ns,
        1_000_000,
        6_000_000,
        2_000_000,
        1_000_000,
        [BatchMember(*m) for m in batch],
        [BlockOp(*op) for op in ops],
        [NewToken(*t) for t in tokens],
        [Finish(*f) for f in finished],
        list(decisions),
        counters,
    )


def arrived(request, prompt=6, max_tokens=10):
    return RequestArrived(
        request=request,
        name=f"r{request}",
        time_ns=0,
        prompt_token_ids=list(range(prompt)),
        prompt_pieces=["x"] * prompt,
        max_tokens=max_tokens,
        temperature=0.0,
    )


class Trace:
    """A state and a history that take in the same messages."""

    def __init__(self, **limits):
        self.state = PoolState(HEADER)
        self.history = History(**limits)

    def take(self, *messages):
        for message in messages:
            self.state.apply(message)
            if isinstance(message, StepTrace):
                self.history.append(message, self.state)
        return self

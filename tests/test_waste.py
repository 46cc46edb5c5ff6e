from __future__ import annotations

import pytest
from small_trace import HEADER, MODEL, Trace, arrived, step

from engine.trace.events import Op, Phase
from engine.trace.state import PoolState
from kvtui.formulas import formulas_of
from kvtui.waste import waste_of


def test_waste_follows_the_formulas_and_counts_a_shared_block_once():
    trace = Trace().take(
        arrived(0, prompt=6, max_tokens=10),
        arrived(1, prompt=6, max_tokens=100),
        step(
            0,
            [(0, Phase.PREFILL, 0, 6), (1, Phase.PREFILL, 4, 2)],
            ops=[
                (Op.ALLOCATE, 0, 0, 0),
                (Op.FILL, 0, 0, 4),
                (Op.ALLOCATE, 1, 0, 1),
                (Op.FILL, 1, 0, 2),
                (Op.SHARE, 0, 1, 0),
                (Op.ALLOCATE, 2, 1, 1),
                (Op.FILL, 2, 1, 2),
            ],
        ),
    )
    waste = waste_of(trace.state)
    assert waste.held_tokens == 4 + 2 + 2
    assert waste.used_blocks == 3
    assert waste.utilisation == pytest.approx(8 / 12)
    assert waste.waste == pytest.approx(1 - 8 / 12)
    assert waste.reserved_waste == pytest.approx(1 - (6 + 6) / (16 + 50)), "the second is limited by max_model_len"
    assert waste.bytes == 8 * MODEL.kv_bytes_per_token
    assert waste_of(PoolState(HEADER)) == (0, 0, 0.0, 0.0, 0.0, 0)


def test_what_is_behind_a_sliding_window_is_held_no_more():
    trace = Trace().take(
        arrived(0, prompt=6, max_tokens=10),
        step(
            0,
            [(0, Phase.PREFILL, 0, 6)],
            ops=[
                (Op.ALLOCATE, 0, 0, 0),
                (Op.ALLOCATE, 1, 0, 1),
                (Op.FILL, 0, 0, 4),
                (Op.FILL, 1, 0, 2),
                (Op.RELEASE, 0, 0, 0),
            ],
        ),
    )
    waste = waste_of(trace.state)
    assert (waste.held_tokens, waste.used_blocks) == (2, 1)
    assert waste.reserved_waste == pytest.approx(1 - 2 / 16)
    assert trace.state.requests[0].num_blocks == 1
    blocks = next(f for f in formulas_of(trace.state, trace.history, waste) if f.name == "blocks")
    assert (blocks.numbers, blocks.value) == ("⌈2/4⌉", "1")

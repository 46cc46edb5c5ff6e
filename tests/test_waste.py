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
    assert waste.reserved_slots == 16 + 50, "the second is limited by max_model_len"
    assert waste.reserved_waste == pytest.approx(1 - 8 / (16 + 50)), "the four shared ones would lie there twice"
    assert waste.bytes == 8 * MODEL.kv_bytes_per_token
    assert waste_of(PoolState(HEADER)) == (0, 0, 0.0, 0.0, 0, 0.0, 0)


def test_sharing_does_not_make_reserving_look_thrifty():
    shared, asked = range(4), range(6)
    ops = [op for block in shared for op in ((Op.ALLOCATE, block, 0, block), (Op.FILL, block, 0, 4))]
    ops += [(Op.SHARE, block, number, block) for number in asked[1:] for block in shared]
    for number in asked:
        ops += [(Op.ALLOCATE, 4 + number, number, 4), (Op.FILL, 4 + number, number, 1)]
    batch = [(number, Phase.PREFILL, 16 if number else 0, 1 if number else 17) for number in asked]
    arrivals = [arrived(number, prompt=17, max_tokens=1) for number in asked]
    waste = waste_of(Trace().take(*arrivals, step(0, batch, ops=ops)).state)
    assert (waste.held_tokens, waste.used_blocks, waste.reserved_slots) == (16 + 6, 10, 6 * 18)
    assert waste.waste == pytest.approx(1 - 22 / 40)
    assert waste.reserved_waste == pytest.approx(1 - 22 / 108), "not 1 - 102/108: five copies of 16 tokens are waste"


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

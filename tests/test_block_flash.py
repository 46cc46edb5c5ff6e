"""What the last steps touched, and for how long it stays lit."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.simulated import simulated_engine
from engine.trace.events import BlockOp, Op
from engine.trace.state import PoolState
from kvtui import block_codes as bc
from kvtui import block_flash
from kvtui.block_flash import FLASH_SECONDS, Flash, changes_of

if TYPE_CHECKING:
    import pytest


def step(*ops: tuple[int, int, int, int]) -> SimpleNamespace:
    return SimpleNamespace(ops=[BlockOp(*op) for op in ops])


def kinds_of(*steps, num_blocks=10) -> dict[int, int]:
    state = PoolState(msgspec.structs.replace(simulated_engine().header, num_blocks=num_blocks))
    blocks, kinds = changes_of(steps, state)
    return dict(zip(blocks.tolist(), kinds.tolist(), strict=True))


def test_each_block_is_named_once_with_the_flash_that_matters_most() -> None:
    found = kinds_of(
        step((Op.EVICT, 3, 77, 0), (Op.ALLOCATE, 3, 0, 0), (Op.FILL, 4, 0, 2)),
        step((Op.RELEASE, 1, 0, 0), (Op.HASH, 4, 99, 0), (Op.COPY, 1, 5, 3), (Op.SWAP_IN, 2, 6, 0)),
        step((Op.SWAP_OUT, 1, 0, 0)),
    )
    assert found == {
        1: bc.FLASH_SWAPPED,
        3: bc.FLASH_EVICTED,
        4: 0,
        5: bc.FLASH_CHANGED,
        6: bc.FLASH_SWAPPED,
    }


def test_steps_long_past_are_told_but_not_lit() -> None:
    old, new = step((Op.ALLOCATE, 2, 0, 0)), step((Op.ALLOCATE, 7, 0, 0))
    assert kinds_of(old, *[step()] * 60, new) == {2: 0, 7: bc.FLASH_CHANGED}


def test_what_is_no_block_of_the_pool_is_left_out() -> None:
    odd = step((Op.ALLOCATE, -1, 0, 0), (Op.ALLOCATE, 10, 0, 0), (Op.DROP, 3, 0, 0), (250, 4, 0, 0), (-7, 4, 0, 0))
    assert kinds_of(odd) == {}
    assert kinds_of(step((Op.ALLOCATE, 2**80, 0, 0), (Op.ALLOCATE, 9, 2**70, 0), (Op.RELEASE, 8, 0, 0))) == {8: 1}
    assert kinds_of() == {}


def test_few_operations_are_found_as_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    for _ in range(200):
        ops = [(rng.randint(-1, 11), rng.randint(-2, 11), rng.randint(-2, 11), 0) for _ in range(rng.randint(0, 30))]
        steps = [step(*ops[at : at + 9]) for at in range(0, len(ops), 9)]
        few = kinds_of(*steps)
        with monkeypatch.context() as patch:
            patch.setattr(block_flash, "_FEW_OPS", -1)
            assert few == kinds_of(*steps)


def test_a_block_lit_again_goes_out_later() -> None:
    flash = Flash(10)
    both, one = np.array([2, 5]), np.array([5])
    assert flash.light_up(both, np.array([1, 2], np.uint8), now=0.0).tolist() == [2, 5]
    flash.light_up(one, np.array([1], np.uint8), now=FLASH_SECONDS / 2)
    assert flash.put_out(FLASH_SECONDS).tolist() == [2]
    assert flash.kinds.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert flash
    assert flash.put_out(FLASH_SECONDS * 2).tolist() == [5]
    assert not flash
    assert not flash.kinds.any()

"""What a cell of one block says: its kind, how full it is or how often it is held, and whose it is."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from kvtui.block_codes import (
    CACHED,
    FREE,
    GLYPH_MASK,
    HUE_MASK,
    HUE_SHIFT,
    LEVEL,
    MANY,
    NUM_LEVELS,
    SECOND,
    SHARED,
    Emphasis,
    block_codes,
    char_codes,
)
from kvtui.block_layout import lay_out, levels_for


def codes_of(refs, filled=0, key=0, owner=0, block_size=8):
    n = len(refs)
    state = SimpleNamespace(
        header=SimpleNamespace(block_size=block_size),
        refs=np.array(refs, np.int32),
        filled=np.broadcast_to(np.array(filled, np.int32), n),
        key=np.broadcast_to(np.array(key, np.int64), n),
        owner=np.broadcast_to(np.array(owner, np.int32), n),
    )
    return block_codes(state, slice(None), 7, Emphasis())


def test_without_references_a_block_is_cached_or_free_and_nobodys() -> None:
    assert codes_of([0, 0], key=[0, 5], owner=3).tolist() == [FREE, CACHED]


def test_from_two_references_on_their_number_is_told_up_to_nine_and_then_that_there_are_many() -> None:
    glyphs = codes_of([1, 2, 3, 9, 10, 500], filled=8) & GLYPH_MASK
    assert glyphs.tolist() == [LEVEL + NUM_LEVELS - 1, SHARED, SHARED + 1, SHARED + 7, MANY, MANY]


def test_a_block_in_use_is_as_high_as_it_is_full_and_never_empty() -> None:
    assert ((codes_of([1] * 9, filled=range(9)) & GLYPH_MASK) - LEVEL).tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    sixteenths = (codes_of([1] * 17, filled=range(17), block_size=16) & GLYPH_MASK) - LEVEL
    assert sixteenths.tolist() == [0, *(eighth for eighth in range(8) for _ in range(2))]


def test_the_second_character_of_a_wide_cell_is_told_from_the_first_and_from_the_gap() -> None:
    levels = levels_for(4, 40, 9)
    codes = np.array([FREE, CACHED, SHARED, MANY], np.uint16)
    wide = char_codes(codes, 1, lay_out(4, levels[0], 40, 9))[0, :12].tolist()
    assert wide[:11] == [
        FREE,
        FREE | SECOND,
        0,
        CACHED,
        CACHED | SECOND,
        0,
        SHARED,
        SHARED | SECOND,
        0,
        MANY,
        MANY | SECOND,
    ]
    narrow = char_codes(codes, 1, lay_out(4, levels[2], 40, 9))[0, :7].tolist()
    assert narrow == [FREE, 0, CACHED, 0, SHARED, 0, MANY]


def test_hues_go_around_the_cycle_by_owner() -> None:
    hues = codes_of([1] * 4, owner=[0, 6, 7, 15]) >> HUE_SHIFT & HUE_MASK
    assert hues.tolist() == [1, 7, 1, 2]

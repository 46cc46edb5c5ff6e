"""Every panel in a few sentences, for the help that is opened from it."""

from __future__ import annotations

from typing import NamedTuple


class PanelHelp(NamedTuple):
    """What a panel is called, and what one sees in it."""

    title: str
    words: str


PANEL_HELP: dict[str, PanelHelp] = {
    "blocks": PanelHelp(
        "Physical blocks",
        """The memory of the KV cache itself: each cell is one block of the pool, or several where the line below says
        so, at its address. Hue says which request holds it, height how many of its slots hold tokens, and a digit
        that so many requests share it.""",
    ),
    "requests": PanelHelp(
        "Requests",
        """Everyone in the engine, those who run first, then those who wait and why, then the ended ones. The block
        table lists where in the pool a request's tokens lie, in order; numbers that several requests share say by
        how many.""",
    ),
    "pool": PanelHelp(
        "Pool",
        """How much of the pool is used, cached and free, over the steps. The digits under it count what was lost to
        pressure in that column, preemptions and evictions; below stand the present bottleneck with the setting that
        would move it, and the waste: the slots in use without a token, beside the slots that would hold none, or a
        copy, had each request reserved its maximum for itself.""",
    ),
    "batch": PanelHelp(
        "Batch per iteration",
        """Who was computed in each iteration of the engine: a row a request, a column a step. Continuous batching lets
        rows begin and end at any column; a gap in a row is a request that waits or was preempted.""",
    ),
    "inspector": PanelHelp(
        "Inspector",
        """All that is known about what is selected: a request with its text and where its time went, or a block with
        its owner, fill and content. v turns its pages: what happened to a block, what was decided about a request and
        on what numbers, the step, and which blocks are taken next.""",
    ),
    "log": PanelHelp(
        "Log",
        """What the engine and the libraries under it printed, which would otherwise spoil the screen. The newest line
        is the last.""",
    ),
    "prefixes": PanelHelp(
        "Prefix tree",
        """The token prefixes whose blocks can still be found, as a tree: a request that begins with one of them takes
        its blocks instead of computing them. Each line says how long it is, who uses it now, how often it was hit, and
        its text.""",
    ),
    "old-way": PanelHelp(
        "The old way",
        """The same requests, if each had reserved memory in one piece for the longest that it can become, as engines
        did before paging. The strip shows what of it would be written, what reserved and unused, and the holes between
        pieces; below, who would have to wait, and what is wasted: what holds nothing, or a copy of what another piece
        holds, since pieces share nothing.""",
    ),
    "formulas": PanelHelp(
        "Formulas",
        """What the figures on screen are worked out from, with the present numbers put in. L is the layers, H the heads
        for keys and values, d the size of a head, B the slots of a block, S the tokens of a request, b the requests, P
        the bytes of an element.""",
    ),
}
"""By the id of the panel that has the focus."""

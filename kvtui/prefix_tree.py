"""The published contents as a tree of prefixes: what follows what, with chains without a branching taken as one run.

A radix tree over content keys (Morrison, PATRICIA, 1968): a block's key chains all tokens before it, so equal prefixes
have equal keys, and the key in front of a block (`PoolState.parent`) is its place in the tree. The tree is kept in step
with a state by the blocks that an operation named, whatever else the pool holds; after a jump it is brought up to date
by the blocks that differ. It is the same whichever way the state was reached.
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

from engine.trace.events import Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from engine.trace.events import Header, StepTrace
    from engine.trace.state import PoolState

    Blocks = npt.NDArray[np.int64]


class Place(enum.IntEnum):
    """Where a content is; the first that holds counts."""

    USED = 0
    """In a block that somebody holds."""
    CACHED = 1
    """In a block that nobody holds."""
    CPU = 2
    """In the CPU pool alone."""


_ALLOCATE, _SHARE, _HASH, _RELEASE, _EVICT = (int(op) for op in (Op.ALLOCATE, Op.SHARE, Op.HASH, Op.RELEASE, Op.EVICT))
_SWAP_OUT, _SWAP_IN, _DROP = int(Op.SWAP_OUT), int(Op.SWAP_IN), int(Op.DROP)
_AT_ONCE = 1024
"""Blocks that are taken in between two looks at the clock."""
_TOUCHES = frozenset({_ALLOCATE, _SHARE, _HASH, _RELEASE, _EVICT})


class Node:
    """One content.

    Attributes:
        key: Its content key.
        parent: The key in front of it; 0: none, or not known.
        blocks: Blocks that hold it, several where it was computed twice.
        cpu_blocks: CPU blocks that hold it.
        run: Where it is in the tree.
        at: Its place in the run.
    """

    __slots__ = ("at", "blocks", "cpu_blocks", "key", "parent", "place", "run")

    def __init__(self, key: int, parent: int) -> None:
        self.key = key
        self.parent = parent
        self.blocks: tuple[int, ...] = ()
        self.cpu_blocks: tuple[int, ...] = ()
        self.place = Place.CPU
        self.run: Run
        self.at = 0


class Run:
    """Contents that follow each other without a branching between them.

    Attributes:
        nodes: At least one.
        above: The run that it branches off from; None for the tree's own.
        below: Runs that branch off, the most hit first.
        counts: Nodes by `Place`.
        hits: Of the first node: how often it was shared.
    """

    __slots__ = ("above", "below", "counts", "hits", "nodes")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.above: Run | None = None
        self.below: list[Run] = []
        self.counts = [0, 0, 0]
        self.hits = 0

    @property
    def rank(self) -> tuple[int, int]:
        """The order among its siblings."""
        return -self.hits, self.nodes[0].key

    def is_as_long_as(self, blocks: int) -> bool:
        """Whether so many contents follow each other from its first one on, those of a branch counted along."""
        branches = [(self, 0)]
        while branches:
            run, above = branches.pop()
            length = above + len(run.nodes)
            if length >= blocks:
                return True
            branches += [(below, length) for below in run.below]
        return False


class PrefixTree:
    """The tree of a state's published contents.

    Attributes:
        top: A run without nodes; below it those that begin a text, and those whose beginning is gone or not known.
        nodes: By content key.
        counts: Contents by `Place`.
    """

    def __init__(self, header: Header) -> None:
        self.top = Run()
        self.nodes: dict[int, Node] = {}
        self.counts = [0, 0, 0]
        self._orphans: dict[int, dict[Run, None]] = {}
        """By the key that is missing in front of them."""
        n = header.num_blocks
        self._key = np.zeros(n, np.int64)
        self._used = np.zeros(n, np.bool_)
        self._hits = np.zeros(n, np.int32)
        self._cpu_key = np.zeros(header.num_cpu_blocks, np.int64)

    # -- following -----------------------------------------------------------------------------------------------

    def follow(self, state: PoolState, steps: Iterable[StepTrace]) -> None:
        """Take in the blocks that these steps, which led to the state, named."""
        touched: set[int] = set()
        cpu_touched: set[int] = set()
        for step in steps:
            for op, a, b, _ in step.ops:
                if op in _TOUCHES:
                    touched.add(a)
                elif op == _SWAP_OUT:
                    cpu_touched.add(b)
                elif op == _SWAP_IN:
                    cpu_touched.add(a)
                    touched.add(b)
                elif op == _DROP:
                    cpu_touched.add(a)
        if touched or cpu_touched:
            n, cpu = state.header.num_blocks, state.header.num_cpu_blocks
            self._take_in(state, _inside(touched, n), _inside(cpu_touched, cpu))

    def jump(self, state: PoolState, budget_s: float = float("inf")) -> bool:
        """Take in whatever is different; time proportional to the pool, in numpy, and to what differs.

        Args:
            state: Where to be.
            budget_s: Stop once this much time has passed; another call goes on.

        Returns:
            Whether everything is taken in.
        """
        deadline = time.monotonic() + budget_s
        differs = (self._key != state.key) | (self._used != (state.refs > 0)) | (self._hits != state.hits)
        blocks = np.flatnonzero(differs)
        cpu_blocks = np.flatnonzero(self._cpu_key != state.cpu_key)
        if budget_s == float("inf"):
            self._take_in(state, blocks, cpu_blocks)
            return True
        while True:
            self._take_in(state, blocks[:_AT_ONCE], cpu_blocks[:_AT_ONCE])
            blocks, cpu_blocks = blocks[_AT_ONCE:], cpu_blocks[_AT_ONCE:]
            if not len(blocks) and not len(cpu_blocks):
                return True
            if time.monotonic() > deadline:
                return False

    def _take_in(self, state: PoolState, blocks: Blocks, cpu_blocks: Blocks) -> None:
        # What is new comes in before what is gone goes out: a content that only moved keeps its place. And parents
        # come in first, so that fewer have to wait for them.
        blocks = blocks[np.argsort(state.logical[blocks], kind="stable")]
        gone: list[tuple[Node, int]] = []
        gone_cpu: list[tuple[Node, int]] = []
        old_keys, keys = self._key[blocks].tolist(), state.key[blocks].tolist()
        parents = state.parent[blocks].tolist()
        self._key[blocks] = state.key[blocks]
        self._used[blocks] = state.refs[blocks] > 0
        self._hits[blocks] = state.hits[blocks]
        nodes = self.nodes
        for block, old, new, parent in zip(blocks.tolist(), old_keys, keys, parents, strict=True):
            if old == new:
                continue
            if old in nodes:
                gone.append((nodes[old], block))
            if new:
                node = self._node(new, parent)
                node.blocks = (*node.blocks, block)
        old_cpu_keys, cpu_keys = self._cpu_key[cpu_blocks].tolist(), state.cpu_key[cpu_blocks].tolist()
        cpu_parents = state.cpu_parent[cpu_blocks].tolist()
        self._cpu_key[cpu_blocks] = state.cpu_key[cpu_blocks]
        for block, old, new, parent in zip(cpu_blocks.tolist(), old_cpu_keys, cpu_keys, cpu_parents, strict=True):
            if old == new:
                continue
            if old in nodes:
                gone_cpu.append((nodes[old], block))
            if new:
                node = self._node(new, parent)
                node.cpu_blocks = (*node.cpu_blocks, block)
        for node, block in gone:
            node.blocks = tuple(b for b in node.blocks if b != block)
        for node, block in gone_cpu:
            node.cpu_blocks = tuple(b for b in node.cpu_blocks if b != block)
        for key in dict.fromkeys((*keys, *old_keys, *cpu_keys, *old_cpu_keys)):
            changed = nodes.get(key)
            if changed is None:
                continue
            if changed.blocks or changed.cpu_blocks:
                self._settle(changed)
            else:
                self._remove(changed)

    def _settle(self, node: Node) -> None:
        """Count a node where it belongs now, and move its run to its place among its siblings."""
        used = self._used
        place = Place.CPU
        if node.blocks:
            place = Place.USED if any(used[block] for block in node.blocks) else Place.CACHED
        run = node.run
        if place is not node.place:
            run.counts[node.place] -= 1
            run.counts[place] += 1
            self.counts[node.place] -= 1
            self.counts[place] += 1
            node.place = place
        if node.at == 0:
            self._rank(run)

    def _rank(self, run: Run) -> None:
        hits = max((int(self._hits[block]) for block in run.nodes[0].blocks), default=0)
        if hits != run.hits:
            above = run.above
            assert above is not None
            _take_out(above, run)
            run.hits = hits
            insort(above.below, run, key=_rank_of)

    # -- shape ---------------------------------------------------------------------------------------------------

    def _node(self, key: int, parent: int) -> Node:
        node = self.nodes.get(key)
        if node is not None:
            return node
        node = self.nodes[key] = Node(key, parent if parent != key else 0)
        self.counts[Place.CPU] += 1
        before = self.nodes.get(node.parent)
        if before is None:
            run = self._new_run(node, self.top)
            if node.parent:
                self._orphans.setdefault(node.parent, {})[run] = None
        else:
            if before.at + 1 < len(before.run.nodes):
                self._split(before.run, before.at + 1)
            if before.run.below:
                self._new_run(node, before.run)
            else:
                _append(before.run, node)
        self._adopt(node)
        return node

    def _new_run(self, node: Node, above: Run) -> Run:
        run = Run()
        _append(run, node)
        self._hang(run, above)
        return run

    def _hang(self, run: Run, above: Run) -> None:
        run.above = above
        insort(above.below, run, key=_rank_of)

    def _adopt(self, node: Node) -> None:
        """Hang those that were waiting for this node below it; not a circle, which a made-up trace can have."""
        waiting = self._orphans.pop(node.key, None)
        if not waiting:
            return
        root = node.run
        while root.above is not None and root.above is not self.top:
            root = root.above
        for run in waiting:
            if run is not root:
                _take_out(self.top, run)
                self._hang(run, node.run)
        self._join(node.run)

    def _split(self, run: Run, at: int) -> None:
        """Cut a run in two; the second half hangs below the first."""
        tail = Run()
        for node in run.nodes[at:]:
            run.counts[node.place] -= 1
            _append(tail, node)
        del run.nodes[at:]
        tail.below, run.below = run.below, []
        for below in tail.below:
            below.above = tail
        tail.hits = max((int(self._hits[block]) for block in tail.nodes[0].blocks), default=0)
        self._hang(tail, run)

    def _join(self, run: Run) -> None:
        """Make one run of two where nothing branches off between them any more."""
        if run is self.top or len(run.below) != 1:
            return
        tail = run.below[0]
        for node in tail.nodes:
            _append(run, node)
        run.below = tail.below
        for below in run.below:
            below.above = run

    def _remove(self, node: Node) -> None:
        run = node.run
        if node.at + 1 < len(run.nodes):
            self._split(run, node.at + 1)
        for below in run.below:
            self._hang(below, self.top)
            self._orphans.setdefault(node.key, {})[below] = None
        run.below = []
        run.counts[node.place] -= 1
        self.counts[node.place] -= 1
        del self.nodes[node.key]
        if node.at:
            run.nodes.pop()
            return
        above = run.above
        assert above is not None
        _take_out(above, run)
        waiting = self._orphans.get(node.parent)
        if waiting is not None and waiting.pop(run, False) is None and not waiting:
            del self._orphans[node.parent]
        self._join(above)

    # -- walking -------------------------------------------------------------------------------------------------

    def after(self, run: Run, folded: frozenset[int] | set[int] = frozenset()) -> Run | None:
        """The run on the next line, depth first; what is below a run whose first key is folded is passed over."""
        if run.below and (run is self.top or run.nodes[0].key not in folded):
            return run.below[0]
        while run.above is not None:
            at = _place_of(run.above, run) + 1
            if at < len(run.above.below):
                return run.above.below[at]
            run = run.above
        return None

    def before(self, run: Run, folded: frozenset[int] | set[int] = frozenset()) -> Run | None:
        """The run on the line before."""
        above = run.above
        if above is None:
            return None
        at = _place_of(above, run)
        if at == 0:
            return above if above is not self.top else None
        run = above.below[at - 1]
        while run.below and run.nodes[0].key not in folded:
            run = run.below[-1]
        return run

    def is_last(self, run: Run) -> bool:
        """Whether no sibling comes after it."""
        return run.above is None or run.above.below[-1] is run

    def runs(self) -> Iterator[Run]:
        """All of them, in the order of the lines."""
        run = self.after(self.top)
        while run is not None:
            yield run
            run = self.after(run)


def _inside(blocks: set[int], stop: int) -> Blocks:
    """Those that exist: a made-up trace names any."""
    return np.array([block for block in blocks if 0 <= block < stop], np.int64)


def _rank_of(run: Run) -> tuple[int, int]:
    return run.rank


def _place_of(above: Run, run: Run) -> int:
    return bisect_left(above.below, run.rank, key=_rank_of)


def _take_out(above: Run, run: Run) -> None:
    del above.below[_place_of(above, run)]


def _append(run: Run, node: Node) -> None:
    node.run, node.at = run, len(run.nodes)
    run.nodes.append(node)
    run.counts[node.place] += 1

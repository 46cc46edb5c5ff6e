"""What of a request's tokens need not be computed: which places of its block table that takes, and where they are."""

from __future__ import annotations

from itertools import chain, groupby, repeat
from typing import TYPE_CHECKING, Final, NamedTuple

from engine.trace.events import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class FoundPrefix(NamedTuple):
    """The first tokens of a request whose keys and values exist.

    Attributes:
        num_tokens: How many.
        num_behind: Places in front that need no block: they are behind the window of every token to come.
        blocks: A block for each place from there on; NO_BLOCK where the content is in the CPU pool.
        swapped: Whether that is what the request was swapped out with; it goes on where it was.
    """

    num_tokens: int
    num_behind: int
    blocks: Sequence[int]
    swapped: bool = False

    @property
    def num_shared(self) -> int:
        """Places whose block is in the pool already."""
        return len(self.blocks) - self.num_brought

    @property
    def num_brought(self) -> int:
        """Places whose content is to be brought back from the CPU pool."""
        return self.blocks.count(NO_BLOCK)

    def runs(self, num_places: int) -> tuple[list[range], list[range]]:
        """Neighbours among the places of a table that begins like this: those shared, and those to be allocated.

        Args:
            num_places: Of the whole table.
        """
        behind, blocks = self.num_behind, self.blocks
        end = behind + len(blocks)
        if NO_BLOCK not in blocks:
            return [range(behind, end)] if blocks else [], [range(end, num_places)] if end < num_places else []
        shared: list[range] = []
        missing: list[range] = []
        start = behind
        for is_missing, run in groupby(chain(blocks, repeat(NO_BLOCK, num_places - end)), NO_BLOCK.__eq__):
            stop = start + sum(1 for _ in run)
            (missing if is_missing else shared).append(range(start, stop))
            start = stop
        return shared, missing


NOTHING_FOUND: Final = FoundPrefix(0, 0, ())


def num_places_behind(num_tokens: int, block_size: int, window: int) -> int:
    """Blocks wholly behind the window of the token that follows so many, and so of all after it.

    Token number n sees the tokens from n - window + 1 on.

    Args:
        num_tokens: Tokens in front of it.
        block_size: Tokens a block holds.
        window: Tokens that attention looks back at most, the newest included; 0 where it sees all of them.
    """
    return max(0, num_tokens - window + 1) // block_size if window else 0


def longest_prefix(
    digests: Sequence[bytes], where: Callable[[bytes], int | None], block_size: int, window: int
) -> FoundPrefix:
    """The longest prefix of which every block is there that a token behind it looks back at.

    Without a window these are all of its blocks. With one they are the last few: those in front of them may be gone.

    Args:
        digests: Keys of the blocks, in logical order.
        where: The block with such a content, NO_BLOCK where it is in the CPU pool, None where it is nowhere.
        block_size: Tokens a block holds.
        window: See `num_places_behind`.
    """
    found: list[int] = []
    if not window:
        for digest in digests:
            block = where(digest)
            if block is None:
                break
            found.append(block)
        return FoundPrefix(len(found) * block_size, 0, found)
    # From the end: whatever is not there ends the prefixes that are still possible in front of it.
    end = place = len(digests)
    # A window of one token looks back at no block; a prefix of which nothing is there is none all the same.
    while place > min(num_places_behind(end * block_size, block_size, window), max(0, end - 1)):
        place -= 1
        block = where(digests[place])
        if block is None:
            end = place
            found.clear()
        else:
            found.append(block)
    return FoundPrefix(end * block_size, place, found[::-1])

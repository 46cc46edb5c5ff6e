"""The race's help: what is raced, each lane in two sentences, and the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from kvtui.widgets.batch_timeline import LEGEND
from kvtui.widgets.marks import mark_row

if TYPE_CHECKING:
    from kvtui.glyphs import Glyphs
    from kvtui.palette import Palette

ABOUT = """The same requests arrive at the same moments in every lane, and each lane has the same memory. Time is
reckoned, so much for a step and so much for each token in it, and one axis of time lies over all lanes: a column is the
same moment in each, so that one sees a lane done while another still runs. The first line of a lane is how many
requests were computed together, on one scale for all; below it a row is a request. The title of a lane says how many
were computed together on average up to now, how many tokens a second came of that, and how many times those of the
slowest lane."""

LANES = {
    "static": """A batch is filled once and computed until its last request has ended; nobody joins before. Each request
has reserved memory in one piece for the longest that it can become.""",
    "contiguous": """Requests join and leave the batch at every step. Each still reserves memory in one piece for the
longest that it can become, so that few fit, and holes between the pieces are lost.""",
    "paged": """Requests join and leave at every step, and take memory block by block, as their text grows. More fit at
once; when the pool runs out all the same, the youngest gives its blocks up and is computed again later.""",
}
"""Each lane by its policy."""

BAR = """The line below the lanes has the time, how much of the race is over and how fast it is shown. Once all
lanes are done, it says how many times the tokens a second of the others the last lane made."""

KEYS = (
    ("space", "pause and resume; at the end, once more from the start"),
    ("{left} {right}", "to where the step before, or the next one, of any lane ends; ten with shift"),
    ("home end", "the start and the finish"),
    ("+ - 0", "zoom in on the present, and out; the whole race"),
    ("[ ]", "slower, faster: 0.25x to 16x"),
    ("tab", "go to the next lane; up and down, or k and j, walk through its requests"),
    ("click", "select a request: it is lit in every lane; on the axis or the bar, or dragged along: go to that time"),
    ("esc", "select nothing"),
    ("t", "next theme"),
    ("ctrl+p", "every command by name"),
    ("q ctrl+q", "quit; then the result is printed"),
)


def race_text(palette: Palette, glyphs: Glyphs, policy: str) -> Text:
    """The page as styled text, the lane of this policy first."""
    text = Text(style=palette.text)
    order = [policy, *(name for name in LANES if name != policy)]
    for name in order:
        if name in LANES:
            text.append(f"{name}\n", palette.accent)
            text.append(f"{_flow(LANES[name])}\n\n", palette.text)
    text.append("The race\n", palette.accent)
    text.append(f"{_flow(ABOUT)}\n\n{_flow(BAR)}\n\n", palette.text)
    row = mark_row(glyphs)
    for mark, words in LEGEND:
        text.append(f"  {row[mark]}", palette.hue(0))
        text.append(f"  {words}\n", palette.text)
    text.append("\nKeys", palette.accent)
    return text


def _flow(words: str) -> str:
    return " ".join(words.split())

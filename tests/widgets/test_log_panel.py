from __future__ import annotations

import threading

import pytest
from panel_session import PALETTE, Session, lines, shown

from kvtui.widgets.log_panel import LogPanel, level_of


class Clock:
    seconds = 1_700_000_000.0

    def __call__(self) -> float:
        return self.seconds


async def test_lines_appear_when_drained_the_newest_at_the_bottom():
    panel = LogPanel()
    async with shown(panel, Session().view(), 60, 4):
        assert "appears here" in lines(panel)[0]
        for i in range(6):
            panel.write(f"line {i}")
        assert "appears here" in lines(panel)[0]
        assert panel.drain() == 6
        assert [line.split()[-1] for line in lines(panel)] == ["2", "3", "4", "5"]


async def test_equal_lines_in_a_row_are_one_line_with_a_count():
    panel = LogPanel(clock=Clock())
    async with shown(panel, Session().view(), 60, 5):
        for text in ("no blocks for #3", "no blocks for #3", "no blocks for #3", "other", "no blocks for #3"):
            panel.write(text)
        panel.drain()
        drawn = [line.strip() for line in lines(panel) if line.strip()]
        assert len(drawn) == 3
        assert "×3" in drawn[0]
        assert "×" not in drawn[2]


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("all is well", "info"),
        ("/x/y.py:3: UserWarning: old", "warning"),
        ("WARNING root: careful", "warning"),
        ("Traceback (most recent call last):", "error"),
        ("ValueError: no", "error"),
        ("[ERROR] failed", "error"),
        ("terror and warnings-free", "info"),
    ],
)
def test_levels_are_read_off_the_words(text, level):
    assert level_of(text) == level


async def test_levels_are_told_apart_with_and_without_colour():
    panel = LogPanel()
    async with shown(panel, Session().view(), 60, 3):
        panel.write("fine")
        panel.write("hm", level="warning")
        panel.write("bad", level="error")
        panel.drain()
        signs = [line[10:12].strip() for line in lines(panel)]
        assert signs == ["", "?", "!"]
        texts = ("fine", "hm", "bad")
        colours = {s.style.color for y in range(3) for s in panel.render_line(y) if s.text.strip() in texts}
        assert len(colours) == 3
        assert PALETTE.error.color in colours


async def test_what_comes_in_is_untrusted():
    panel = LogPanel()
    async with shown(panel, Session().view(), 50, 4):
        panel.write("\x1b[2J\x1b[31m[bold]\tx\r\n字" + "y" * 100_000)
        panel.drain()
        drawn = lines(panel)
        assert "␛[2J␛[31m[bold]⇥x" in drawn[0]
        assert drawn[1].rstrip().endswith("…")


async def test_memory_is_bounded_and_what_is_lost_is_counted():
    panel = LogPanel(most_lines=10)
    async with shown(panel, Session().view(), 60, 20):
        for i in range(25):
            panel.write(f"line {i}")
        panel.drain()
        assert panel.lines == [f"line {i}" for i in range(16, 25)] + ["15 lines came too fast and were dropped"]


async def test_many_threads_can_write_at_once():
    panel = LogPanel(most_lines=5000)
    async with shown(panel, Session().view(), 60, 5):
        threads = [threading.Thread(target=lambda t=t: [panel.write(f"{t} {i}") for i in range(300)]) for t in range(4)]
        for thread in threads:
            thread.start()
        taken = 0
        while any(thread.is_alive() for thread in threads):
            taken += panel.drain()
        for thread in threads:
            thread.join()
        taken += panel.drain()
        assert taken == 1200
        assert sorted(panel.lines) == sorted(f"{t} {i}" for t in range(4) for i in range(300))


async def test_scrolling_back_holds_the_window_still_while_lines_come_in():
    panel = LogPanel()
    async with shown(panel, Session().view(), 60, 4) as pilot:
        panel.focus()
        for i in range(20):
            panel.write(f"line {i}")
        panel.drain()
        await pilot.press("pageup", "up")
        back = lines(panel)
        panel.write("line 20")
        panel.drain()
        assert lines(panel) == back
        await pilot.press(*["pagedown"] * 3)
        assert lines(panel)[-1].split()[-1] == "20"

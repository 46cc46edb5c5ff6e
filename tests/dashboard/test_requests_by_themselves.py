"""What brings requests to a live session by itself: the screen tells of it, and a key holds it."""

from __future__ import annotations

from live_dashboard import Live
from screen_text import frame, screen_lines, text_of


class Feeding:
    """What brings requests by itself, or would."""

    def __init__(self, *, done: bool = False) -> None:
        self.held = False
        self.done = done
        self.name = "stream"

    @property
    def state(self) -> str:
        return "stream held" if self.held else "stream goes on"

    def welcome(self, key: str) -> str:
        return f"Example requests. {key} holds them."

    def toggle(self) -> None:
        self.held = not self.held


def notices(live: Live) -> list[str]:
    return [notice.message for notice in live.app._notifications]


async def test_who_opens_the_screen_is_told_where_requests_come_from_and_w_holds_them() -> None:
    feed = Feeding()
    live = Live(feed=feed)
    live.ask(3)
    async with live.app.run_test(size=(200, 50)) as pilot:
        live.run(3)
        await frame(pilot)
        assert notices(live) == ["Example requests. w holds them."]
        assert "stream goes on · w holds it" in text_of(live.app)
        assert "w requests" in screen_lines(live.app)[-1]
        await pilot.press("w")
        await frame(pilot)
        assert feed.held
        assert "stream held · w lets it go on" in text_of(live.app)
        await pilot.press("w")
        assert not feed.held


async def test_w_says_so_where_nothing_comes_by_itself() -> None:
    for feed in (None, Feeding(done=True)):
        live = Live(feed=feed)
        async with live.app.run_test(size=(200, 50)) as pilot:
            await pilot.press("w")
            await frame(pilot)
            assert notices(live) == ["no requests come by themselves here"]
            assert "holds it" not in text_of(live.app)

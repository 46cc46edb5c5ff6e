"""Keys and commands as such: all are harmless with nothing to show, have a name, and can be given another key."""

from __future__ import annotations

import pytest
from live_dashboard import Live
from screen_text import frame, screen_lines, text_of

from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from kvtui.app import KvtuiApp
from kvtui.sources.recorded import RecordingSource


async def test_an_empty_session_says_how_to_send_a_request() -> None:
    live = Live(listen_url="http://127.0.0.1:8077")
    async with live.app.run_test(size=(200, 50)) as pilot:
        await frame(pilot)
        picture = text_of(live.app)
        assert "kvtui inject" in picture
        assert "http://127.0.0.1:8077" in picture


KEYS = [
    "space",
    "left",
    "right",
    "shift+left",
    "shift+right",
    "home",
    "end",
    "L",
    "r",
    "comma",
    "full_stop",
    "m",
    "a",
    "b",
    "c",
    "left_square_bracket",
    "right_square_bracket",
    "tab",
    "shift+tab",
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    "h",
    "j",
    "k",
    "l",
    "up",
    "down",
    "pageup",
    "pagedown",
    "plus",
    "minus",
    "enter",
    "y",
    "w",
    "t",
    "t",
    "t",
    "t",
    "escape",
    "question_mark",
    "escape",
    "slash",
    "escape",
]


@pytest.mark.parametrize(
    ("size", "when"), [((200, 50), "after the last"), ((80, 24), "before the first request")], ids=["wide", "narrow"]
)
async def test_every_key_is_harmless_with_nothing_to_show(size, when) -> None:
    live = Live()
    if when == "after the last":
        live.ask(2, max_tokens=3)
        live.run(10)
        assert not live.engine.has_work
    async with live.app.run_test(size=size) as pilot:
        await frame(pilot)
        await pilot.press(*KEYS)
        await frame(pilot)
        screen_lines(live.app)
        assert live.app.is_running


async def test_every_key_is_harmless_in_a_recording_without_steps(tmp_path) -> None:
    live = Live()
    RecordingWriter(tmp_path / "empty.mcap", live.engine.header).close()
    with Recording.open(tmp_path / "empty.mcap") as recording:
        app = KvtuiApp(RecordingSource(recording), theme="dark")
        async with app.run_test(size=(120, 34)) as pilot:
            await pilot.press(*KEYS)
            await frame(pilot)
            screen_lines(app)


async def test_the_command_palette_knows_every_action_by_name() -> None:
    live = Live()
    async with live.app.run_test(size=(120, 34)) as pilot:
        await frame(pilot)
        commands = {command.title for command in live.app.get_system_commands(live.app.screen)}
        assert {"Quit", "Pause or resume", "Find a request or a block", "Help", "Theme: light"} <= commands
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press(*"ten steps")
        await pilot.pause(0.3)
        assert "Ten steps" in text_of(live.app)


def test_every_binding_has_an_id_so_that_it_can_be_given_another_key() -> None:
    ids = [binding.id for binding in KvtuiApp.BINDINGS]
    assert all(ids)
    assert len(set(ids)) == len(ids)

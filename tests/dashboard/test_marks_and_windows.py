"""Ways through a long session: from mark to mark, and a window that is played again and again."""

from __future__ import annotations

import functools
import re

import pytest
from live_dashboard import Live
from pressed_engine import pressed_engine, run
from screen_text import frame, screen_lines

from engine.trace.events import StepTrace
from engine.trace.marks import ALL_KINDS, MarkKind, marks_of
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from kvtui.app import KvtuiApp
from kvtui.sources.playback import Playback
from kvtui.sources.recorded import RecordingSource


def pressed_recording(tmp_path, steps: int = 120):
    """A recording in which there are marks of every kind, and where each is."""
    engine = pressed_engine()
    path = tmp_path / "pressed.mcap"
    taken = []
    with RecordingWriter(path, engine.header) as writer:
        engine.add_sink(writer)
        engine.add_sink(taken.append)
        run(engine, steps)
    flags = [marks_of(message) for message in taken if isinstance(message, StepTrace)]
    return path, {kind: [at for at, flag in enumerate(flags) if flag >> kind & 1] for kind in MarkKind}


@pytest.mark.parametrize("size", [(140, 40), (80, 24)])
async def test_keys_go_from_mark_to_mark_of_all_kinds_or_of_one(size, tmp_path) -> None:
    path, marked = pressed_recording(tmp_path)
    everywhere = sorted({at for steps in marked.values() for at in steps})
    with Recording.open(path) as recording:
        source = RecordingSource(recording)
        source.pause()
        app = KvtuiApp(source, theme="dark")
        async with app.run_test(size=size) as pilot:
            await frame(pilot)
            for at in everywhere[:3]:
                await pilot.press("full_stop")
                assert source.position == at
            await pilot.press("comma")
            assert source.position == everywhere[1]
            await pilot.press("home", "m", "full_stop")
            assert source.position == marked[MarkKind.PREEMPTED][0]
            await frame(pilot)
            bar = screen_lines(app)[-2]
            assert "▼" in bar
            assert "▌" not in bar.split("▼ ")[0], "the other kinds are left out"
            await pilot.press("m", "end", "comma")
            assert source.position == marked[MarkKind.EVICTED][-1 if marked[MarkKind.EVICTED][-1] < 119 else -2]
            await pilot.press("m", "m", "m", "m")
            await frame(pilot)
            assert app.mark_kinds == ALL_KINDS
            await pilot.press("end", "full_stop")
            assert source.position == 119
            assert any("no mark of any kind after step 119" in notice.message for notice in app._notifications)


async def test_a_number_beside_the_bar_shows_its_kind_of_mark_alone(tmp_path) -> None:
    path, marked = pressed_recording(tmp_path)
    with Recording.open(path) as recording:
        source = RecordingSource(recording)
        source.pause()
        app = KvtuiApp(source, theme="dark", ascii_only=True)
        async with app.run_test(size=(140, 40)) as pilot:
            await frame(pilot)
            bar = screen_lines(app)[-2]
            counts = f"v {len(marked[0])} x {len(marked[1])} ! {len(marked[2])} % {len(marked[3])} | {len(marked[4])}"
            assert counts in bar
            await pilot.click("#transport", offset=(bar.index(counts) + counts.index("!"), 0))
            await frame(pilot)
            assert app.mark_kinds == 1 << MarkKind.REFUSED
            await pilot.click("#transport", offset=(bar.index(counts) + counts.index("!"), 0))
            assert app.mark_kinds == ALL_KINDS


async def test_marks_of_a_live_session_lead_into_its_past() -> None:
    live = Live()
    live.ask(6)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(60)
        await frame(pilot)
        flags = live.source.marks.flags(0, 60).tolist()
        last = max(at for at, flag in enumerate(flags[:59]) if flag)
        await pilot.press("comma")
        assert (live.source.position, live.source.looking_back) == (last, True)
        assert not live.loop.paused
        assert live.source.marks.counts[MarkKind.FINISHED] == sum(flag >> MarkKind.FINISHED & 1 for flag in flags)


async def test_a_recording_without_marks_is_looked_through_while_it_is_shown(tmp_path) -> None:
    path, marked = pressed_recording(tmp_path)
    with Recording.open(path) as recording:
        recording._layout._marks_at = None
        source = RecordingSource(recording)
        source.pause()
        app = KvtuiApp(source, theme="dark")
        async with app.run_test(size=(140, 40)) as pilot:
            for _ in range(20):
                await frame(pilot)
            assert source.marks.known == 1
            assert f"▼ {len(marked[0])}" in screen_lines(app)[-2]


async def test_what_a_key_did_is_said_in_the_place_of_what_the_one_before_it_did(tmp_path) -> None:
    path, _ = pressed_recording(tmp_path)
    with Recording.open(path) as recording:
        source = RecordingSource(recording)
        source.pause()
        app = KvtuiApp(source, theme="dark")
        async with app.run_test(size=(120, 34), notifications=True) as pilot:
            await frame(pilot)
            for key in ("left_square_bracket", "right_square_bracket", "right_square_bracket"):
                await pilot.press(key)
            await frame(pilot)
            assert re.findall(r"speed [\d.]+", "\n".join(screen_lines(app))) == ["speed 2"]


async def test_a_window_is_played_again_and_again_until_it_is_cleared(tmp_path) -> None:
    path, _ = pressed_recording(tmp_path)
    with Recording.open(path) as recording:
        now = [0]
        source = RecordingSource(recording, clock=lambda: now[0])
        source.pause()
        app = KvtuiApp(source, theme="dark")
        async with app.run_test(size=(120, 34)) as pilot:
            source.seek(40)
            await pilot.press("a")
            source.seek(50)
            await pilot.press("b")
            assert source.window == (40, 50)
            await frame(pilot)
            bar = screen_lines(app)[-2]
            assert bar.index("[") < bar.index("●", bar.index("["))
            await pilot.press("r")
            seen = []
            for _ in range(60):
                now[0] += 300_000_000
                await frame(pilot)
                seen.append(source.position)
            assert set(seen) <= set(range(40, 51))
            assert seen.count(50) >= 2, "it comes around"
            assert "loop" in screen_lines(app)[-2]
            await pilot.press("c")
            assert source.window is None
            now[0] += 1_000_000_000_000
            await frame(pilot)
            now[0] += 1_000_000_000_000
            await frame(pilot)
            assert source.position > 50
            await pilot.press("home", "b")
            assert source.window == (0, 0)


async def test_a_window_of_a_live_session_is_played_while_the_engine_goes_on(monkeypatch) -> None:
    # Time stands still until the position was looked at, however busy the machine is.
    monkeypatch.setattr("kvtui.sources.live.Playback", functools.partial(Playback, clock=lambda: 0))
    live = Live()
    live.ask(6)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(20)
        await frame(pilot)
        await pilot.press("a")
        live.run(10)
        await frame(pilot)
        await pilot.press("b")
        assert live.source.window == (19, 29)
        live.run(10)
        await frame(pilot)
        await pilot.press("r")
        assert live.source.looking_back
        assert live.source.position in (19, 20), "it plays from its first step on"
        seen = {19}
        past = live.source._past
        past._clock = iter(range(0, 10**15, 200_000_000)).__next__
        for _ in range(30):
            await frame(pilot)
            seen.add(live.source.position)
        assert seen <= set(range(19, 30))
        assert {19, 29} <= seen
        await pilot.press("L")
        assert not live.source.looking_back

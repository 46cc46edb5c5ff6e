"""The race on screen: lanes at one moment, forward and backward."""

from __future__ import annotations

import re

import numpy as np
import pytest
from races import arrivals, lanes
from screen_text import text_of

from engine.trace.events import StepTrace
from engine.trace.state import PoolState
from kvtui.palette import ThemeError
from kvtui.race import app as race_app
from kvtui.race import playing
from kvtui.race.app import RaceApp
from kvtui.race.playing import LanePlayer
from kvtui.settings import Settings

RACED = lanes(arrivals())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def players() -> list[LanePlayer]:
    return [LanePlayer(lane) for lane in RACED]


def test_a_lane_shows_the_same_whichever_way_one_came(monkeypatch):
    monkeypatch.setattr(playing, "CHECKPOINT_STEPS", 8)
    player = players()[2]
    straight = PoolState(player.header)
    for message in player.lane.messages:
        straight.apply(message)
        if isinstance(message, StepTrace) and message.index == 20:
            break
    assert len(player.show(player.ends[20])) == 21
    assert player.state.same_as(straight) == []
    player.show(1e9)
    assert player.done
    assert player.show(player.ends[20]) is None
    assert player.state.same_as(straight) == []
    assert player.moment.steps == 21


@pytest.mark.parametrize("size", [(160, 45), (80, 24), (60, 16)])
async def test_three_timelines_run_under_one_clock_until_the_last_is_done(size):
    clock = Clock()
    app = RaceApp(players(), "small", clock=clock)
    async with app.run_test(size=size) as pilot:
        clock.now = 0.2
        app.tick()
        await pilot.pause()
        text = text_of(app)
        for policy in ("static", "contiguous", "paged"):
            assert re.search(rf"─ {policy} ─ (average|avg) batch \d", text)
        assert "0.2 / " in text
        assert len(re.findall(r"▪", text)) > 3
        clock.now = 10_000.0
        app.tick()
        await pilot.pause()
        text = text_of(app)
        assert app.paused
        titles = [line for line in text.splitlines() if line.startswith("╭")]
        assert sum("· done " in title for title in titles) == (3 if size[0] > 60 else 0), "goes where there is no room"
        assert re.search(r"paged: \d\.\d\d× static, \d\.\d\d× contiguous", text)


async def test_keys_pause_step_and_jump():
    clock = Clock()
    app = RaceApp(players(), "small", clock=clock)
    async with app.run_test(size=(120, 30)) as pilot:
        await pilot.press("space")
        assert app.paused
        clock.now = 5.0
        app.tick()
        assert app.seconds == 0
        ends = sorted({end for player in app.players for end in player.ends})
        await pilot.press("right", "right", "right")
        assert app.seconds == ends[2]
        await pilot.press("left")
        assert app.seconds == ends[1]
        await pilot.press("shift+right")
        assert app.seconds == ends[11]
        await pilot.press("end")
        assert app.seconds == ends[-1]
        assert all(player.done for player in app.players)
        await pilot.press("left")
        assert not all(player.done for player in app.players)
        await pilot.press("home")
        assert [player.position for player in app.players] == [-1, -1, -1]
        await pilot.press("left", "right_square_bracket", "right_square_bracket")
        assert (app.seconds, app.speed) == (0, 4.0)
        await pilot.press("space")
        clock.now += 1.0
        app.tick()
        assert app.seconds == pytest.approx(min(4.0, app.total))


async def test_a_click_selects_a_request_in_every_lane_and_ascii_and_small_terminals_are_served(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    app = RaceApp(players(), "small", ascii_only=True, clock=Clock())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("end")
        assert text_of(app).isascii()
        await pilot.press("ctrl+p")
        for _ in range(40):
            await pilot.pause(0.05)
            if "One step back" in text_of(app):
                break
        text = text_of(app)
        assert "One step back" in text
        assert text.isascii(), [c for c in text if not c.isascii()]
        await pilot.press("escape")
        await pilot.click("#lane-paged", offset=(4, 2))
        await pilot.pause()
        assert app._selected is not None
        await pilot.press("escape")
        assert app._selected is None
        await pilot.resize_terminal(50, 10)
        await pilot.pause()
        assert "kvtui needs 60 x 16" in text_of(app)


async def test_while_the_terminal_has_not_taken_what_was_drawn_nothing_is_drawn_and_then_the_present(monkeypatch):
    clock, waiting = Clock(), [3]
    monkeypatch.setattr(race_app, "pending_writes", lambda driver: waiting[0])
    app = RaceApp(players(), "small", clock=clock)
    async with app.run_test(size=(120, 30)):
        clock.now = 0.2
        app.tick()
        assert app.seconds == 0.0
        waiting[0] = 0
        app.tick()
        assert app.seconds == pytest.approx(0.2)


async def test_the_bar_is_pressed_and_dragged_and_the_footers_words_are_clicked():
    app = RaceApp(players(), "small", clock=Clock())
    async with app.run_test(size=(120, 30)) as pilot:
        await pilot.pause()
        bar = text_of(app).splitlines()[-2]
        start, stop = bar.index("─"), bar.rindex("─")
        await pilot.mouse_down("#race-bar", offset=((start + stop) // 2, 0))
        await pilot.pause()
        assert app.paused
        assert app.seconds == pytest.approx(app.total / 2, rel=0.05)
        await pilot.hover("#race-bar", offset=(stop, 0))
        await pilot.mouse_up("#race-bar", offset=(stop, 0))
        await pilot.pause()
        assert app.seconds == pytest.approx(app.total, abs=0.06)
        for words, expected in (("home", 0.0), ("end", app.total)):
            await pilot.click("#footer", offset=(text_of(app).splitlines()[-1].index(words), 0))
            await pilot.pause()
            assert app.seconds == expected
        assert "space resume" in text_of(app)


async def test_keys_of_the_users_own_are_those_of_the_dashboard(tmp_path):
    settings = Settings(tmp_path / "config.toml", keys={"app.pause": "z", "app.end": "f5"})
    app = RaceApp(players(), "small", settings=settings, clock=Clock())
    async with app.run_test(size=(120, 30)) as pilot:
        await pilot.press("space")
        assert not app.paused
        await pilot.press("z")
        assert app.paused
        await pilot.press("f5")
        assert app.seconds == app.total
        assert "z resume" in text_of(app)
        assert "f5 finish" in text_of(app)


@pytest.mark.parametrize("ascii_only", [False, True])
async def test_the_help_begins_with_the_lane_in_focus_and_has_every_key(ascii_only):
    app = RaceApp(players(), "small", ascii_only=ascii_only, clock=Clock())
    async with app.run_test(size=(84, 70)) as pilot:
        await pilot.press("tab", "tab", "question_mark")
        await pilot.pause()
        text = text_of(app)
        first = [line.strip("│| ") for line in text.splitlines() if line.strip("│| ")][1]
        assert first == "paged"
        assert text.isascii() == ascii_only
        flowing = " ".join(line.strip("│| ") for line in text.splitlines())
        for words in ("static", "contiguous", "take memory block by block", "ten with shift", "recompute"):
            assert words in " ".join(flowing.split())
        await pilot.press("escape")
        assert "take memory block by block" not in text_of(app)


def test_an_unknown_theme_is_named():
    with pytest.raises(ThemeError, match="no theme named 'nope'"):
        RaceApp(players(), "small", theme="nope")


def lane_rows(text: str, policy: str) -> list[str]:
    """The lines of a lane between its borders."""
    lines = text.splitlines()
    first = next(y for y, line in enumerate(lines) if line.startswith(f"╭─ {policy} "))
    stop = next(y for y in range(first, len(lines)) if lines[y].startswith("╰"))
    return [line[1:-1] for line in lines[first + 1 : stop]]


@pytest.mark.parametrize("size", [(200, 50), (80, 24)])
@pytest.mark.parametrize("zoom", [0, 1])
async def test_a_column_is_the_same_moment_in_every_lane_and_the_whole_race_fits(size, zoom):
    app = RaceApp(players(), "small", clock=Clock())
    async with app.run_test(size=size) as pilot:
        for share in (0.3, 0.6, 1.0):
            app._go(app.total * share)
            await pilot.press("0", *["plus"] * zoom)
            await pilot.pause()
            text = text_of(app)
            inner = size[0] - 2
            axis = app._time.axis(inner)
            assert axis.columns == inner - app._time.label - 1
            if not app._time.zoom:
                assert (axis.start, axis.stop) == pytest.approx((0, app.total))
                assert "the whole race" in text
            else:
                assert f"{axis.start:,.1f} to {axis.stop:,.1f} s" in text
            assert re.search(r"1 column = [\d.]+ m?s ·", text)
            at = app._time.label + 1
            present = text.splitlines()[1][1:-1].index("●") - at
            assert present == axis.column_of(app.seconds)
            for player in app.players:
                batch, *rows = lane_rows(text, player.lane.policy)
                ends = min(app.seconds, player.result.seconds)
                drawn = len(batch[at:].partition(" │")[0].rstrip())
                assert drawn == (axis.column_of(np.nextafter(ends, 0)) + 1 if ends > axis.start else 0)
                for row in rows:
                    assert len(row[at:].rstrip()) <= drawn, "nothing lies behind the end, or the present"


async def test_one_sees_a_lane_done_while_another_still_runs():
    app = RaceApp(players(), "small", clock=Clock())
    static, _, paged = (player.result for player in app.players)
    assert paged.seconds < static.seconds
    async with app.run_test(size=(200, 50)) as pilot:
        app._go((paged.seconds + static.seconds) / 2)
        await pilot.pause()
        text = text_of(app)
        assert f"│ done after {paged.seconds:.1f} s" in lane_rows(text, "paged")[0]
        titles = {line.split()[1]: line for line in text.splitlines() if line.startswith("╭")}
        assert f"average batch {paged.average_batch:.2f} · {paged.tokens_per_s:,.1f} tokens/s" in titles["paged"]
        assert f"· done after {paged.seconds:.1f} s" in titles["paged"]
        assert "so far" in titles["static"]
        assert "done" not in titles["static"]
        assert "the slowest" in titles["static"]


@pytest.mark.parametrize("size", [(200, 50), (80, 24)])
async def test_at_the_finish_each_lane_says_its_average_batch_throughput_and_speed_up_over_all_of_it(size):
    app = RaceApp(players(), "small", clock=Clock())
    results = [player.result for player in app.players]
    async with app.run_test(size=size) as pilot:
        await pilot.press("end")
        titles = [line for line in text_of(app).splitlines() if line.startswith("╭")]
        for title, result in zip(titles, results, strict=True):
            assert f"batch {result.average_batch:.2f} ·" in title
            assert f" {result.tokens_per_s:,.1f} tok" in title
            times = result.tokens_per_s / results[0].tokens_per_s
            assert (f"{times:.2f}× static" if result.policy != "static" else "the slowest") in title
            assert re.search(rf"done (after )?{result.seconds:,.1f} s", title)


async def test_zooming_stops_at_the_whole_race_and_where_a_step_has_its_own_columns():
    app = RaceApp(players(), "small", clock=Clock())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("minus")
        assert app._time.zoom == 0
        await pilot.press(*["plus"] * 20)
        axis = app._time.axis(78)
        assert app._time.shortest / 4 < axis.column < app._time.shortest * 2
        await pilot.press("end")
        assert app._time.axis(78).stop == pytest.approx(app.total)
        await pilot.press("home")
        assert app._time.axis(78).start == 0


async def test_a_press_on_the_axis_goes_to_that_time():
    app = RaceApp(players(), "small", clock=Clock())
    async with app.run_test(size=(120, 30)) as pilot:
        await pilot.pause()
        await pilot.mouse_down("#race-axis", offset=(60, 0))
        await pilot.pause()
        axis = app._time.axis(118)
        assert app.paused
        assert axis.column_of(app.seconds - 1e-9) == 60 - 1 - app._time.label - 1
        await pilot.hover("#race-axis", offset=(118, 0))
        await pilot.mouse_up("#race-axis", offset=(118, 0))
        await pilot.pause()
        assert app.seconds == pytest.approx(app.total)


async def test_requests_without_a_row_are_counted_and_keys_and_wheel_lead_to_them():
    app = RaceApp(players(), "small", clock=Clock())
    async with app.run_test(size=(200, 24)) as pilot:
        await pilot.press("end")
        text = text_of(app)
        shown = len(lane_rows(text, "static")) - 1
        assert f"{8 - shown} more requests: j k" in text
        assert "ask-0" in lane_rows(text, "static")[1]
        await pilot.press("down")
        assert "ask-1" in lane_rows(text_of(app), "static")[1]

"""The whole dashboard, driven by keys and mouse over an engine without a model."""

from __future__ import annotations

import asyncio
import functools
import re
from typing import TYPE_CHECKING

import pytest
from pressed_engine import pressed_engine, run
from rich.cells import cell_len

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.loop import EngineLoop
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import StepTrace
from engine.trace.marks import ALL_KINDS, MarkKind, marks_of
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from kvtui.app import KvtuiApp
from kvtui.block_flash import FLASH_SECONDS
from kvtui.capture_output import OutputCapture
from kvtui.palette import ThemeError, load_palettes
from kvtui.sources.live import LiveSource
from kvtui.sources.playback import Playback
from kvtui.sources.recorded import RecordingSource
from kvtui.view import Panel

if TYPE_CHECKING:
    from textual.pilot import Pilot

PROMPT = "the shared beginning of all questions here: "
NASTY = "\x1b[31mred\x1b[0m [bold]no markup[/bold] \t字🙂👩‍👩‍👧\x07 end"


class Live:
    """An engine that only steps when told, and the app over it."""

    def __init__(self, num_blocks: int = 48, block_size: int = 4, **app) -> None:
        self.engine = simulated_engine(
            EngineConfig(
                cache=CacheConfig(num_blocks=num_blocks, block_size=block_size),
                scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=160),
            )
        )
        self.loop = EngineLoop(self.engine)
        self.source = LiveSource(self.engine, self.loop)
        self.app = KvtuiApp(self.source, theme=app.pop("theme", "dark"), **app)

    def ask(self, count: int = 1, max_tokens: int = 40, text: str = PROMPT) -> None:
        for i in range(count):
            self.engine.add_request(f"{text}{i}", SamplingParams(max_tokens=max_tokens), name=f"ask-{i}")

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()


async def frame(pilot: Pilot[None]) -> None:
    """Let one frame happen, whatever the pace says."""
    await pilot.pause()
    pilot.app.hurry()
    await pilot.pause()


def screen_lines(app: KvtuiApp) -> list[str]:
    """The screen as text; every line is exactly as wide as the screen."""
    app.screen._compositor_refresh()
    lines = [strip.text for strip in app.screen._compositor.render_strips()]
    assert len(lines) == app.size.height
    for y, line in enumerate(lines):
        assert cell_len(line) == app.size.width, f"line {y}: {line!r}"
    return lines


def text_of(app: KvtuiApp) -> str:
    return "\n".join(screen_lines(app))


@pytest.mark.parametrize("size", [(200, 50), (110, 30), (80, 24), (60, 16)])
async def test_a_newcomer_sees_blocks_and_streaming_text_without_touching_anything(size) -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=size) as pilot:
        live.run(12)
        await frame(pilot)
        picture = text_of(live.app)
        assert "Physical blocks" in picture
        assert re.search(r"█|▇", picture)
        assert "following ask-" in picture
        output = "".join(live.source.state.requests[0].pieces[live.source.state.requests[0].num_prompt_tokens :])
        followed = live.app.main.inspector.followed
        request = live.source.state.requests[followed]
        output = "".join(request.pieces[request.num_prompt_tokens :]).split()
        assert output[-1] in picture
        live.run(4)
        await frame(pilot)
        assert text_of(live.app) != picture


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


async def test_resizing_quickly_from_nothing_to_huge_and_back_never_fails() -> None:
    live = Live()
    live.ask(5)
    sizes = [
        (1, 1),
        (300, 80),
        (59, 16),
        (60, 15),
        (60, 16),
        (80, 24),
        (109, 40),
        (110, 30),
        (2, 70),
        (300, 2),
        (200, 50),
    ]
    async with live.app.run_test(size=(80, 24)) as pilot:
        for size in [*sizes, *reversed(sizes)]:
            live.run(1)
            await pilot.resize_terminal(*size)
            pilot.app.hurry()
        await frame(pilot)
        for size in sizes:
            await pilot.resize_terminal(*size)
            await frame(pilot)
            picture = "\n".join(screen_lines(live.app))
            if size[0] >= 60 and size[1] >= 16:
                assert "Physical blocks" in picture
            elif size[0] > 50 and size[1] > 1:
                assert "kvtui needs 60 x 16" in picture


TITLES = {
    "1": "Physical blocks",
    "2": "Requests",
    "3": "Pool",
    "4": "Batch per iteration",
    "5": "Inspector",
    "6": "Log",
    "7": "Prefix tree",
    "8": "The old way",
    "9": "Formulas",
}


@pytest.mark.parametrize("size", [(60, 16), (80, 24)])
async def test_every_panel_is_reached_by_number_by_tab_and_by_mouse_where_there_is_room_for_one(size) -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=size) as pilot:
        live.run(5)
        await frame(pilot)
        for key, title in TITLES.items():
            await pilot.press(key)
            await frame(pilot)
            assert f"─ {title}" in text_of(live.app)
        await pilot.press("1")
        seen = []
        for _ in TITLES:
            await frame(pilot)
            seen += [title for title in TITLES.values() if f"─ {title}" in text_of(live.app)][:1]
            await pilot.press("tab")
        assert set(seen) == set(TITLES.values())
        bar = next(line for line in screen_lines(live.app) if "3 Pool" in line)
        await pilot.click("#tabs", offset=(bar.index("3 Pool"), 0))
        await frame(pilot)
        assert "─ Pool" in text_of(live.app)


async def test_selecting_a_block_selects_its_owner_and_shows_its_text() -> None:
    live = Live()
    live.ask(2)
    async with live.app.run_test(size=(200, 50)) as pilot:
        live.run(6)
        await frame(pilot)
        state = live.source.state
        block = next(b for b in range(48) if state.owner[b] == 1 and state.filled[b] == 4)
        live.app.select_block(block)
        await frame(pilot)
        view = live.app.view()
        assert (view.selected_request, view.selected_block) == (1, block)
        picture = text_of(live.app)
        assert f"block {block} · owner ask-1" in picture
        shown = "".join(state.block_text(block)).replace(" ", "␣")
        assert shown in picture
        await pilot.press("escape")
        await frame(pilot)
        assert live.app.view().selected_block is None
        assert "following" in text_of(live.app)


@pytest.mark.parametrize(
    ("typed", "request_selected", "block_selected"),
    [
        ("b7", None, 7),
        ("#1", 1, None),
        ("1", 1, None),
        ("ask-0", 0, None),
        ("SHARED beginning", 1, None),
        ("zzz", None, None),
    ],
)
async def test_find_takes_numbers_names_text_and_blocks(typed, request_selected, block_selected) -> None:
    live = Live()
    live.ask(2)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(1)
        await frame(pilot)
        await pilot.press("slash", *("space" if c == " " else c for c in typed.replace("#", "r")), "enter")
        await frame(pilot)
        view = live.app.view()
        assert view.selected_block == block_selected
        if block_selected is None:
            assert view.selected_request == request_selected


async def test_while_paused_a_badge_says_so_and_on_resuming_the_picture_catches_up_by_itself() -> None:
    live = Live(num_blocks=200)
    live.ask(2, max_tokens=100)
    async with live.app.run_test(size=(120, 34)) as pilot:
        await pilot.press("space")
        await frame(pilot)
        assert "PAUSED" in text_of(live.app)
        live.run(90)
        await pilot.press("space")
        for _ in range(100):
            await asyncio.sleep(0.02)
            if live.source.position == 89:
                break
        await asyncio.sleep(0.7)
        picture = text_of(live.app)
        assert "PAUSED" not in picture
        assert "step 89" in picture


async def test_nothing_is_drawn_while_nothing_happens(monkeypatch) -> None:
    live = Live()
    live.ask(2)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(5)
        await pilot.press("space")
        await frame(pilot)
        await asyncio.sleep(1.0)
        drawn = []
        monkeypatch.setattr(live.app, "draw", lambda *_: drawn.append("frame"))
        displayed = []
        monkeypatch.setattr(live.app, "_display", lambda *_: displayed.append("display"))
        await asyncio.sleep(0.6)
        assert drawn == []
        assert displayed == []


async def test_an_engine_that_dies_ends_the_app_with_its_reason() -> None:
    live = Live()

    def burn() -> None:
        raise RuntimeError("the cache caught fire")

    live.engine.step = burn
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.loop.start()
        live.ask()
        for _ in range(200):
            await asyncio.sleep(0.02)
            if live.app.return_code is not None:
                break
        await pilot.pause()
    assert live.app.return_code == 1
    assert live.app.exit_reason == "the engine ended: RuntimeError: the cache caught fire"


@pytest.mark.parametrize("size", [(160, 40), (80, 24)])
async def test_prompts_with_escapes_markup_and_wide_characters_stay_inside_their_borders(size) -> None:
    live = Live(num_blocks=200)
    live.ask(3, text=NASTY)
    async with live.app.run_test(size=size) as pilot:
        live.run(4)
        await frame(pilot)
        for key in ("1", "2", "5"):
            await pilot.press(key)
            await frame(pilot)
            picture = text_of(live.app)
            assert "\x1b" not in picture
            assert "\x07" not in picture
            assert "\t" not in picture
        assert "[bold]no markup[/bold]" in picture


async def test_ascii_draws_with_ascii_alone() -> None:
    for size in ((160, 40), (80, 24)):
        live = Live(ascii_only=True)
        live.ask(4, text="字🙂é ")
        async with live.app.run_test(size=size, notifications=True) as pilot:
            live.run(6)
            for key in "123456":
                await pilot.press(key)
                await frame(pilot)
                for line in screen_lines(live.app):
                    assert line.isascii(), line
            for severity in ("information", "warning", "error"):
                live.app.notify(f"a notice, {severity}", severity=severity)
            await pilot.pause(0.1)
            assert "a notice, error" in text_of(live.app)
            for line in screen_lines(live.app):
                assert line.isascii(), line
            await pilot.press("question_mark")
            await pilot.pause()
            for line in screen_lines(live.app):
                assert line.isascii(), line


@pytest.mark.parametrize("name", ["LC_ALL", "LC_CTYPE", "LANG"])
def test_a_locale_without_unicode_gets_the_ascii_set(monkeypatch, name) -> None:
    for other in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "C")
    assert Live().app.glyphs.ascii
    monkeypatch.setenv(name, "de_DE.UTF-8")
    assert not Live().app.glyphs.ascii


@pytest.mark.parametrize(("ascii_only", "mark"), [(False, "▚"), (True, ";")])
async def test_a_key_marks_what_is_evicted_next_and_legend_and_help_say_so(ascii_only, mark, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    live = Live(num_blocks=24, ascii_only=ascii_only)
    live.ask(4, max_tokens=40)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(250)
        await frame(pilot)
        state = live.source.state
        queue = state.free_queue(8).tolist()
        evicted = sum(1 for block in queue if state.key[block])
        assert evicted > 0
        await asyncio.sleep(FLASH_SECONDS + 0.1)  # What was just evicted says so first.
        await frame(pilot)
        assert mark not in text_of(live.app)
        await pilot.press("e")
        await frame(pilot)
        picture = text_of(live.app)
        assert f"{mark} evicted next {evicted} " in picture
        assert sum(line.count(mark * 2) for line in picture.splitlines()) == evicted
        await pilot.press("question_mark")
        await pilot.pause()
        assert "evicted" in "".join(str(widget.render()) for widget in live.app.screen.query("Static"))
        await pilot.press("escape", "e")
        await frame(pilot)
        assert mark not in text_of(live.app)


async def test_a_policy_without_a_queue_marks_nothing_next() -> None:
    engine = simulated_engine(EngineConfig(scheduler=SchedulerConfig(policy="contiguous")))
    app = KvtuiApp(LiveSource(engine, EngineLoop(engine)), theme="dark")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("e")
        await frame(pilot)
        assert not app.marks_next


async def test_no_color_leaves_no_colour_anywhere(monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    live = Live()
    live.ask(4)
    async with live.app.run_test(size=(160, 40)) as pilot:
        live.run(6)
        live.app.select(1, 3)
        for key in ("", "question_mark"):
            if key:
                await pilot.press(key)
            await frame(pilot)
            for strip in live.app.screen._compositor.render_strips():
                for segment in strip:
                    style = segment.style
                    assert style is None or (style.color is None and style.bgcolor is None), segment


async def test_sixteen_colours_are_the_terminals_own_and_never_black_on_black() -> None:
    live = Live(theme="ansi")
    live.ask(4)
    async with live.app.run_test(size=(160, 40)) as pilot:
        live.run(6)
        await frame(pilot)
        for strip in live.app.screen._compositor.render_strips():
            for segment in strip:
                style = segment.style
                if style is None or not segment.text.strip() or style.color is None:
                    continue
                assert style.color.triplet is None, segment
                assert style.color != style.bgcolor or style.color.is_default, segment


async def test_every_theme_draws_and_the_key_goes_around_them() -> None:
    live = Live()
    live.ask(2)
    names = list(load_palettes())
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(3)
        seen = []
        for _ in names:
            seen.append(live.app.palette.name)
            await pilot.press("t")
            await frame(pilot)
            screen_lines(live.app)
        assert seen == names
        assert live.app.palette.name == names[0]


def test_an_unknown_theme_names_the_known_ones() -> None:
    with pytest.raises(ThemeError, match="no theme named 'pink': choose one of dark"):
        Live(theme="pink")


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


async def test_what_the_process_prints_is_in_the_log_panel() -> None:
    capture = OutputCapture()
    live = Live(capture=capture)
    async with live.app.run_test(size=(80, 24)) as pilot:
        capture.add("UserWarning: \x1b[31mred\x1b[0m")
        await pilot.press("6")
        await frame(pilot)
        picture = text_of(live.app)
        assert "UserWarning" in picture
        assert "\x1b" not in picture


async def test_the_help_fits_any_size_and_explains_the_glyphs() -> None:
    live = Live()
    async with live.app.run_test(size=(120, 120)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        picture = text_of(live.app)
        for words in ("PagedAttention", "cached", "evicted", "shared", "pause and resume", "q ctrl+q"):
            assert words in picture
        await pilot.press("question_mark")
        await frame(pilot)
        assert "PagedAttention" not in text_of(live.app)


async def test_a_recording_is_played_stepped_and_jumped_in(tmp_path) -> None:
    live = Live()
    path = tmp_path / "r.mcap"
    writer = RecordingWriter(path, live.engine.header)
    live.engine.add_sink(writer)
    live.ask(4)
    live.run(30)
    writer.close()
    with Recording.open(path) as recording:
        source = RecordingSource(recording)
        source.pause()
        app = KvtuiApp(source, theme="dark")
        async with app.run_test(size=(120, 34)) as pilot:
            await frame(pilot)
            await pilot.press("right", "right", "right")
            await frame(pilot)
            assert source.position == 2
            await pilot.press("left")
            assert source.position == 1
            await pilot.press("shift+right")
            assert source.position == 11
            await pilot.press("end")
            assert source.position == 29
            await frame(pilot)
            assert "29 / 29" in text_of(app)
            await pilot.press("home")
            assert source.position == -1
            await frame(pilot)
            bar = screen_lines(app)[-2]
            await pilot.click("#transport", offset=(bar.rindex("─") - 1, 0))
            await frame(pilot)
            assert source.position > 20


@pytest.mark.parametrize("size", [(120, 34), (80, 24)])
async def test_the_past_of_a_live_session_is_scrubbed_while_the_engine_goes_on(size) -> None:
    live = Live()
    live.ask(6)
    async with live.app.run_test(size=size) as pilot:
        live.run(30)
        await frame(pilot)
        source = live.source
        assert "look back" in text_of(live.app)
        await pilot.press("left", "left")
        await frame(pilot)
        assert source.position == 27
        picture = text_of(live.app)
        assert "LOOKING BACK" in picture
        assert "the engine goes on" in picture
        assert "LIVE +2" in picture
        assert "27 / 29" in picture
        blocks = screen_lines(live.app)[2:8]
        live.run(10)
        await frame(pilot)
        picture = text_of(live.app)
        assert source.position == 27
        assert "LIVE +12" in picture, "how far the engine is keeps being told"
        assert screen_lines(live.app)[2:8] == blocks, "what is looked at stays"
        await pilot.press("shift+left", "right", "right")
        assert source.position == 19
        await pilot.press("home")
        assert source.position == -1
        await pilot.press("L")
        await frame(pilot)
        assert (source.position, source.looking_back) == (39, False)
        assert "LOOKING BACK" not in text_of(live.app)
        assert not live.loop.paused
        await pilot.press("left")
        await pilot.press("end")
        assert not source.looking_back


async def test_the_bar_of_a_live_session_is_pressed_and_dragged() -> None:
    live = Live()
    live.ask(6)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(40)
        await frame(pilot)
        bar = screen_lines(live.app)[-2]
        start, stop = bar.index("━"), bar.index("●", bar.index("━"))
        await pilot.mouse_down("#transport", offset=((start + stop) // 2, 0))
        await frame(pilot)
        assert 15 < live.source.position < 25
        await pilot.hover("#transport", offset=(start, 0))
        await frame(pilot)
        assert live.source.position == 0
        await pilot.hover("#transport", offset=(119, 0))
        await pilot.mouse_up("#transport", offset=(119, 0))
        await frame(pilot)
        assert not live.source.looking_back, "the right end of the bar is the present"


async def test_pausing_the_engine_and_looking_back_are_told_apart_in_words() -> None:
    live = Live()
    live.ask(6)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(20)
        await frame(pilot)
        await pilot.press("space")
        await frame(pilot)
        picture = text_of(live.app)
        assert "ENGINE PAUSED" in picture
        assert "run engine" in picture
        assert live.loop.paused
        await pilot.press("left")
        await frame(pilot)
        picture = text_of(live.app)
        assert "LOOKING BACK  the engine is paused" in picture
        assert "step the past" in picture
        await pilot.press("space")
        await frame(pilot)
        assert "the engine goes on" in text_of(live.app)
        assert live.source.position == 18
        await pilot.press("home")
        live.source._past._clock = lambda: 0
        await pilot.press("r")
        assert not live.source.paused
        await frame(pilot)
        assert "▶ PAST" in text_of(live.app)
        await pilot.press("r")
        assert live.source.paused


async def test_playing_needs_a_past() -> None:
    live = Live()
    live.ask(2)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(10)
        await frame(pilot)
        await pilot.press("r")
        await frame(pilot)
        assert any("look back first" in notice.message for notice in live.app._notifications)
        assert not live.loop.paused


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


async def test_a_contradiction_in_a_recording_is_named_and_the_playing_goes_on() -> None:
    live = Live()
    live.ask(1)
    async with live.app.run_test(size=(100, 24)) as pilot:
        live.run(2)
        await frame(pilot)
        live.source.state._violate("references", 7, "it is released, but nobody holds it")
        live.run(1)
        await frame(pilot)
        await pilot.press("6")
        await frame(pilot)
        picture = text_of(live.app)
        assert "block 7" in picture
        assert "nobody holds it" in picture
        live.run(2)
        await frame(pilot)
        assert live.source.position == 4


async def test_holding_a_key_with_many_requests_costs_no_more_than_the_screen(monkeypatch) -> None:
    live = Live(num_blocks=4000)
    live.ask(500, max_tokens=20)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(3)
        await frame(pilot)
        await pilot.press("2")
        await frame(pilot)
        table = live.app.main.query_one("#requests", Panel)
        asked = []
        draw = table.draw
        monkeypatch.setattr(table, "draw", lambda *args: asked.append(1) or draw(*args))
        await pilot.press(*["down"] * 20)
        assert len(asked) < 20 * 34


@pytest.mark.parametrize(("before", "after"), [((100, 24), (200, 50)), ((200, 50), (80, 24))])
async def test_a_resize_draws_what_comes_into_sight_also_while_nothing_happens(before, after) -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=before) as pilot:
        live.run(8)
        await frame(pilot)
        live.source.pause()
        await frame(pilot)
        await pilot.resize_terminal(*after)
        await pilot.pause(0.3)
        picture = text_of(live.app)
    wanted = ("Requests ", "Pool", "Batch per iteration") if after == (200, 50) else ("1 Blocks", "2 Requests")
    assert [shown for shown in wanted if shown not in picture] == []


async def test_the_prefix_tree_shares_a_place_with_the_requests_and_leads_to_them() -> None:
    live = Live()
    live.ask(4)
    async with live.app.run_test(size=(200, 50)) as pilot:
        live.run(8)
        await frame(pilot)
        assert "─ Requests" in text_of(live.app)
        await pilot.press("7")
        await frame(pilot)
        picture = text_of(live.app)
        assert "─ Prefix tree" in picture
        assert "─ Requests" not in picture
        await pilot.press("down")
        await frame(pilot)
        view = live.app.view()
        assert live.source.state.table(0)[0] in view.selected_blocks, "they were computed at once, so in several blocks"
        assert view.selected_request is None
        await pilot.press("enter")
        await frame(pilot)
        view = live.app.view()
        assert view.selected_request == 0
        assert view.selected_blocks == ()
        assert "─ Requests" in text_of(live.app)
        await pilot.press("7", "down", "escape")
        await frame(pilot)
        assert live.app.view().selected_prefix is None


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_enter_on_a_request_opens_it_in_the_inspector_and_escape_leads_back(size) -> None:
    live = Live()
    live.ask(4)
    async with live.app.run_test(size=size) as pilot:
        live.run(6)
        await frame(pilot)
        await pilot.press("2", "down", "enter")
        await frame(pilot)
        main = live.app.main
        selected = live.app.view().selected_request
        assert selected is not None
        assert main.focused is main.inspector
        assert f"Inspector · ask-{selected}" in text_of(live.app)
        assert "esc back" in text_of(live.app)
        await pilot.press("escape")
        await frame(pilot)
        assert main.focused.id == "requests"
        assert live.app.view().selected_request == selected
        assert "esc deselect" in text_of(live.app) or size[0] == 80
        await pilot.press("enter")
        await frame(pilot)
        assert live.app.view().selected_request == selected
        assert main.focused is main.inspector
        await pilot.press("escape", "escape")
        await frame(pilot)
        assert live.app.view().selected_request is None
        assert main.focused.id == "requests"


async def test_escape_in_an_inspector_that_was_opened_by_itself_selects_nothing() -> None:
    live = Live()
    live.ask(4)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(6)
        live.app.select(1, None)
        await pilot.press("2", "enter", "4", "5", "escape")
        await frame(pilot)
        assert live.app.main.focused is live.app.main.inspector
        assert live.app.view().selected_request is None


async def test_f_shows_the_formulas_in_the_place_of_the_pool_and_the_pool_again() -> None:
    live = Live()
    live.ask(4)
    async with live.app.run_test(size=(200, 50)) as pilot:
        live.run(8)
        for key, title in (("8", "─ The old way"), ("F", "─ Formulas"), ("F", "─ Pool")):
            await pilot.press(key)
            await frame(pilot)
            titles = [t for t in ("─ The old way", "─ Formulas", "─ Pool") if t in text_of(live.app)]
            assert titles == [title]


async def test_the_footer_says_what_enter_does_with_a_selected_prefix_and_can_be_clicked() -> None:
    live = Live()
    live.ask(2)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(8)
        await frame(pilot)
        await pilot.press("7", "down")
        await frame(pilot)
        last = screen_lines(live.app)[-1]
        assert "enter its requests" in last
        await pilot.click("#footer", offset=(last.index("its requests"), 0))
        await frame(pilot)
        assert live.app.view().selected_request is not None
        assert "─ Requests" in text_of(live.app)


async def test_in_the_requests_the_footer_says_how_to_inspect_one_and_a_click_there_does_it() -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(6)
        await frame(pilot)
        assert "inspect" not in screen_lines(live.app)[-1]
        await pilot.press("2", "j")
        await frame(pilot)
        last = screen_lines(live.app)[-1]
        assert "enter inspect" in last
        await pilot.click("#footer", offset=(last.index("inspect"), 0))
        await frame(pilot)
        assert "Inspector · ask-1 " in text_of(live.app)
        assert "esc back" in screen_lines(live.app)[-1]


async def test_j_and_k_move_in_the_panel_in_focus_and_h_and_l_lead_to_the_blocks() -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(6)
        await frame(pilot)
        await pilot.press("2", "j")
        await frame(pilot)
        assert any(line.startswith("│▸ask-1") for line in screen_lines(live.app))
        await pilot.press("k")
        await frame(pilot)
        assert any(line.startswith("│▸ask-0") for line in screen_lines(live.app))
        await pilot.press("l")
        await frame(pilot)
        assert "Physical blocks" in text_of(live.app)
        assert live.app.selected_block == 0


async def test_a_recording_that_is_opened_in_the_middle_shows_the_steps_before(tmp_path) -> None:
    live = Live()
    writer = RecordingWriter(tmp_path / "middle.mcap", live.engine.header)
    live.engine.add_sink(writer)
    live.ask(3)
    live.run(20)
    writer.close()
    with Recording.open(tmp_path / "middle.mcap") as recording:
        source = RecordingSource(recording, 12)
        source.pause()
        app = KvtuiApp(source, theme="dark")
        async with app.run_test(size=(160, 45)) as pilot:
            await frame(pilot)
            assert len(app.history) == 13


async def test_the_command_palette_is_ascii_where_all_is() -> None:
    live = Live(ascii_only=True)
    async with live.app.run_test(size=(80, 24)) as pilot:
        await pilot.press("space", "ctrl+p")
        for _ in range(20):
            await pilot.pause(0.05)
            if "Blocks: zoom" in text_of(live.app):
                break
        picture = text_of(live.app)
        assert "Blocks: zoom" in picture
        assert "Search for commands" in picture
        assert picture.isascii(), [c for c in picture if not c.isascii()]


async def test_a_selected_prefix_lights_no_block_that_holds_something_else_by_now() -> None:
    live = Live(num_blocks=24)
    live.ask(1, max_tokens=8)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(12)
        await frame(pilot)
        await pilot.press("7", "down", "1")
        await frame(pilot)
        before = live.app.view().selected_blocks
        assert before
        live.ask(3, text="something else that needs all of the blocks there are, ")
        live.run(20)
        await frame(pilot)
        view = live.app.view()
        assert set(view.selected_blocks) < set(before)
        assert all(view.state.touched[block] < 12 for block in view.selected_blocks)


async def test_the_focus_comes_back_with_the_room() -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(8)
        await pilot.press("7")
        await frame(pilot)
        for size in ((20, 5), (80, 24)):
            await pilot.resize_terminal(*size)
            await frame(pilot)
        await frame(pilot)
        assert live.app.main.focused is live.app.main.prefixes
        await pilot.press("down")
        await frame(pilot)
        assert live.app.view().selected_prefix is not None

"""While steps stream by, panels are brought up to date a few at a time; whatever stands still shows one step."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.loop import EngineLoop
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from kvtui.app import KvtuiApp
from kvtui.screens import turns
from kvtui.screens.turns import UNHURRIED_SECONDS, Turns
from kvtui.sources.live import LiveSource
from kvtui.view import Panel

if TYPE_CHECKING:
    from kvtui.screens.turns import Later

PANELS = {name: Panel(id=name) for name in (*UNHURRIED_SECONDS, "blocks")}


def waiting_in(waits: Turns) -> list[Later]:
    return [later for panel in PANELS.values() if (later := waits.later(panel)) is not None]


def test_in_a_frame_few_panels_are_drawn_and_none_is_left_out_for_long() -> None:
    waits = Turns(PANELS)
    drawn: dict[str | None, list[float]] = {name: [] for name in UNHURRIED_SECONDS}
    for frame in range(300):
        now = 10 + frame / 30
        due = waits.take(waiting_in(waits), now, at_once=False)
        assert len(due) <= turns._MOST_IN_A_FRAME
        for later in due:
            drawn[later.panel.id].append(now)
    for name, seconds in UNHURRIED_SECONDS.items():
        gaps = [later - earlier for earlier, later in zip(drawn[name], drawn[name][1:], strict=False)]
        assert max(gaps) < seconds + 0.25, name
        assert min(gaps) >= seconds - 1e-6, name


def test_the_grid_never_waits() -> None:
    assert Turns(PANELS).later(PANELS["blocks"]) is None


def test_where_frames_are_dear_panels_wait_longer() -> None:
    counts = []
    for slowness in (1.0, 4.0):
        waits = Turns(PANELS)
        waits.slowness = slowness
        counts.append(sum(len(waits.take(waiting_in(waits), 10 + frame / 30, at_once=False)) for frame in range(300)))
    assert counts[1] < counts[0] / 2


@pytest.mark.parametrize("how", ["at once", "in a hurry"])
def test_all_are_drawn_where_nothing_streams_by_or_somebody_waits(how: str) -> None:
    waits = Turns(PANELS)
    waits.take(waiting_in(waits), 10, at_once=True)
    if how == "in a hurry":
        waits.hurry()
    assert len(waits.take(waiting_in(waits), 10.001, at_once=how == "at once")) == len(UNHURRIED_SECONDS)
    assert waits.take(waiting_in(waits), 10.002, at_once=False) == []


async def test_paused_in_the_middle_of_a_stream_every_panel_shows_the_same_step() -> None:
    engine = simulated_engine(
        EngineConfig(
            cache=CacheConfig(num_blocks=90, block_size=4),
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=200),
        ),
        step_seconds=0.005,
    )
    loop = EngineLoop(engine)
    source = LiveSource(engine, loop)
    app = KvtuiApp(source, theme="dark")
    for i in range(6):
        engine.add_request(f"tell me of number {i}", SamplingParams(max_tokens=180, ignore_eos=True))
    loop.start()
    try:
        async with app.run_test(size=(200, 50)) as pilot:
            for _ in range(3):
                await pilot.pause(0.35)
                await pilot.press("space")
                assert source.paused
                # The step under way when it was paused comes to its end, and is drawn.
                for _ in range(100):
                    await pilot.pause(0.05)
                    if source.position == source.length - 1 and not app.main.behind:
                        break
                text = "\n".join(strip.text for strip in app.screen._compositor.render_strips())
                state = source.state
                step = state.step
                assert re.search(rf"step {step:,}\b", text), "the header"
                assert f"{state.used} used · {state.cached} cached · {state.free} free" in text, "the title of the grid"
                for request in state.requests.values():
                    assert f"{request.num_computed}/{request.num_tokens}" in text, "the requests"
                legend = re.search(r"free (\d+)  ░ cached (\d+)", text)
                assert legend is not None
                assert (int(legend[1]), int(legend[2])) == (state.free, state.cached), "the legend"
                # The axes of the chart and of the timeline end at the step.
                assert len(re.findall(rf"\b{step:,} *│", text)) >= 2
                await pilot.press("space")
    finally:
        loop.stop()

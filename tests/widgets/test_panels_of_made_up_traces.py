"""Panels over traces that nobody would make: every line is drawn, and as wide as the panel."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from panel_session import Session, lines, shown

from engine.trace.events import BatchMember, BlockOp, Counters, Finish, NewToken, RequestArrived, StepTrace
from kvtui.widgets.formula_sheet import FormulaSheet
from kvtui.widgets.old_way import OldWay
from kvtui.widgets.prefix_tree import PrefixPanel

NUMBER = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 4, 5, 7, 11, 2**31 - 1, 2**62])
SMALL = st.integers(-1, 12)
OP = st.builds(BlockOp, st.integers(-1, 11), SMALL, st.one_of(SMALL, NUMBER), st.one_of(SMALL, NUMBER))
STEP = st.builds(
    lambda ops, batch, tokens, finished, number: StepTrace(
        0, number, 1, 2, 3, 4, batch, ops, tokens, finished, [], Counters(0, 0, 0, 0, 0, 0, number, number, 0, 0)
    ),
    st.lists(OP, max_size=25),
    st.lists(st.builds(BatchMember, SMALL, SMALL, NUMBER, NUMBER), max_size=4),
    st.lists(st.builds(NewToken, SMALL, NUMBER, st.text(max_size=5)), max_size=4),
    st.lists(st.builds(Finish, SMALL, st.sampled_from(["stop", "refused", "x"]), st.just("")), max_size=2),
    NUMBER,
)
ARRIVAL = st.builds(
    lambda number, prompt, max_tokens: RequestArrived(
        request=number,
        name="n",
        time_ns=0,
        prompt_token_ids=list(range(prompt)),
        prompt_pieces=["\x1b"] * prompt,
        max_tokens=max_tokens,
        temperature=0.0,
    ),
    SMALL,
    st.integers(0, 30),
    NUMBER,
)


@pytest.mark.parametrize("panel_of", [PrefixPanel, OldWay, FormulaSheet])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.one_of(STEP, ARRIVAL), min_size=1, max_size=12))
async def test_whatever_a_trace_says_every_line_is_drawn(panel_of, messages):
    session = Session(num_blocks=10)
    panel = panel_of()
    async with shown(panel, session.view(), 72, 12) as pilot:
        panel.focus()
        for index, message in enumerate(messages):
            if isinstance(message, StepTrace):
                message = msgspec.structs.replace(message, index=index)
            session.state.apply(message)
            steps = [message] if isinstance(message, StepTrace) else []
            for step in steps:
                session.history.append(step, session.state)
            panel.update_view(session.view(), steps, False)
            await pilot.press("down")
            lines(panel)
        panel.update_view(session.view(), (), True)
        lines(panel)

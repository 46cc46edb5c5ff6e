from __future__ import annotations

import pytest
from panel_session import Session, busy_session, lines, shown

from kvtui.formulas import formulas_of
from kvtui.glyphs import ASCII
from kvtui.waste import waste_of
from kvtui.widgets.formula_sheet import FormulaSheet


@pytest.mark.parametrize("size", [(104, 40), (78, 40), (56, 60)])
async def test_every_formula_is_there_with_its_numbers_and_its_value(size):
    session = busy_session()
    panel = FormulaSheet()
    async with shown(panel, session.view(), *size):
        text = "\n".join(lines(panel))
        for formula in formulas_of(session.state, session.history, waste_of(session.state)):
            assert formula.name in text
            assert formula.symbols in text
            assert f"{formula.numbers} {formula.value}" in text or f"{formula.numbers} = {formula.value}" in text


async def test_it_scrolls_and_counts_on_with_the_session():
    session = busy_session()
    panel = FormulaSheet()
    async with shown(panel, session.view(), 104, 6) as pilot:
        panel.focus()
        first = lines(panel)
        await pilot.press("down")
        assert lines(panel)[:5] == first[1:]
        await pilot.press(*["pagedown"] * 9)
        assert "found/asked for" in "\n".join(lines(panel))
        await pilot.press(*["pageup"] * 9)
        assert lines(panel) == first
        panel.update_view(session.view(), session.run(2), False)
        assert lines(panel) != first
        assert "step 31" in str(panel.border_title)


async def test_ascii_and_the_empty_state():
    panel = FormulaSheet()
    async with shown(panel, busy_session().view(glyphs=ASCII), 78, 30):
        assert all(line.isascii() for line in lines(panel))
    empty = FormulaSheet()
    async with shown(empty, Session().view(), 78, 5):
        assert "No step yet" in lines(empty)[1]

"""The settings file: what it changes, and how a wrong one is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from screen_text import text_of
from textual.binding import Binding
from typer.testing import CliRunner

from engine.trace.reader import Recording
from kvtui.actions import Actions
from kvtui.app import KvtuiApp
from kvtui.cli.main import app as cli
from kvtui.key_names import shown_keys
from kvtui.packaged import packaged_folder
from kvtui.settings import Settings, SettingsError, load_settings, settings_path
from kvtui.sources.recorded import RecordingSource

WIDE = (200, 50)


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def app_with(settings: Settings, **options: object) -> KvtuiApp:
    path = packaged_folder("recordings") / "under-pressure.mcap"
    source = RecordingSource(Recording.open(path), 200)
    source.pause()
    return KvtuiApp(source, settings=settings, **options)  # type: ignore[arg-type]


def test_without_a_file_everything_is_as_it_comes(tmp_path: Path) -> None:
    assert load_settings(tmp_path / "none.toml") == Settings(tmp_path / "none.toml")


def test_a_variable_names_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, 'theme = "light"')
    monkeypatch.setenv("KVTUI_CONFIG", str(path))
    assert settings_path() == path
    assert load_settings().theme == "light"
    monkeypatch.setenv("KVTUI_CONFIG", str(tmp_path / "gone.toml"))
    with pytest.raises(SettingsError, match=r"gone.toml is not there: make it, or unset KVTUI_CONFIG"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("color = 1", "there is no setting 'color': use ascii, frame_rate"),
        ("theme = 3", "theme = 3 is not possible: it takes a text"),
        ("ascii = 1", "ascii = 1 is not possible: it takes a true or false"),
        ("frame_rate = true", "frame_rate = True is not possible: it takes a whole number"),
        ("frame_rate = 900", "frame_rate = 900 is not possible: use 1 to 30 frames a second"),
        ('hide = ["blocks"]', "hide = 'blocks' is no panel: use requests"),
        ('[keys]\n"app.fly" = "f"', "there is no action 'app.fly': use one of app.quit"),
        ('[keys]\n"app.pause" = 7', '"app.pause" = 7 is not possible: give a key or a list of keys'),
        ('[keys]\n"app.pause" = []', '"app.pause" = \\[\\] is not possible'),
        ('[keys]\n"app.pause" = "q"', "the key 'q' would be both app.quit and app.pause: give one of them another"),
        ('[glyphs]\nstar = "*"', "there is no glyph 'star': use one of free"),
        ('[glyphs]\nfree = "字"', "the glyph free = '字' is not possible: give a character, each one cell wide"),
        ('[glyphs]\nfree = "\\u001b"', "the glyph free = .* is not possible"),
        ('[glyphs]\nlevels = "123"', "the glyph levels = '123' is not possible: give 8 characters"),
        ("theme = ", "cannot be read: "),
    ],
)
def test_what_cannot_be_done_is_told_with_the_file_and_the_choice(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SettingsError, match=told) as raised:
        load_settings(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_remapped_keys_act_and_are_shown_and_the_old_ones_rest(tmp_path: Path) -> None:
    settings = load_settings(
        written(tmp_path, '[keys]\n"app.pause" = ["x", "f5"]\n"app.find" = "="\n"app.zoom-in" = "z"')
    )
    app = app_with(settings)
    async with app.run_test(size=WIDE) as pilot:
        await pilot.press("space")
        assert app.source.paused
        await pilot.press("x")
        assert not app.source.paused
        await pilot.press("f5")
        assert app.source.paused
        await pilot.pause(0.2)
        footer = text_of(app).splitlines()[-1]
        assert "x or f5 resume" in footer
        assert "= find" in footer
        commands = {command.title: command.help for command in app.get_system_commands(app.screen)}
        assert commands["Pause or resume"] == "key x or f5"


async def test_hidden_panels_stay_away_until_they_are_asked_for(tmp_path: Path) -> None:
    app = app_with(load_settings(written(tmp_path, 'hide = ["batch", "inspector"]')))
    async with app.run_test(size=WIDE) as pilot:
        await pilot.pause(0.3)
        assert "Batch per iteration" not in text_of(app)
        assert "Requests" in text_of(app)
        await pilot.press("4")
        await pilot.pause(0.3)
        assert "Batch per iteration" in text_of(app)


async def test_glyphs_and_ascii_are_taken(tmp_path: Path) -> None:
    app = app_with(load_settings(written(tmp_path, '[glyphs]\ndecode = "◼"')))
    async with app.run_test(size=WIDE) as pilot:
        await pilot.pause(0.3)
        assert "◼ decode" in text_of(app)
    app = app_with(load_settings(written(tmp_path, "ascii = true")))
    async with app.run_test(size=WIDE) as pilot:
        await pilot.pause(0.3)
        assert text_of(app).isascii()


async def test_a_theme_of_ones_own_lies_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "themes").mkdir()
    shutil.copy(packaged_folder("themes") / "light.toml", tmp_path / "themes" / "mine.toml")
    settings = load_settings(written(tmp_path, 'theme = "mine"'))
    assert app_with(settings).palette.name == "mine"
    assert app_with(settings, theme="dark").palette.name == "dark"


@pytest.mark.parametrize("rate", [2, 30])
async def test_the_frame_rate_is_an_upper_bound(tmp_path: Path, rate: int) -> None:
    app = app_with(load_settings(written(tmp_path, f"frame_rate = {rate}")))
    assert app._pace.interval == pytest.approx(1 / rate)
    assert app._pace.wait() == pytest.approx(1 / rate)


async def test_a_key_saves_the_screen_as_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = app_with(Settings(tmp_path / "none.toml"))
    async with app.run_test(size=WIDE) as pilot:
        await pilot.pause(0.3)
        await pilot.press("s")
        await pilot.press("s")
        await pilot.pause()
    first, second = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert (first, second) == ("kvtui-step-200-2.svg", "kvtui-step-200.svg")
    assert "Physical" in (tmp_path / second).read_text(encoding="utf-8")


def test_a_wrong_file_ends_a_command_before_anything_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTUI_CONFIG", str(written(tmp_path, 'theme = "nope"')))
    result = CliRunner().invoke(cli, ["run", "--headless", "--workload", "chat"])
    assert result.exit_code == 2
    assert "there is no theme named 'nope'" in result.stderr
    assert str(tmp_path) in result.stderr.replace("\n", "")


def test_the_documents_name_every_action_with_its_keys() -> None:
    text = (Path(__file__).parents[1] / "docs" / "settings.md").read_text(encoding="utf-8")
    for binding in Actions.BINDINGS:
        assert isinstance(binding, Binding)
        keys = " ".join(f"`{shown_keys(key)}`" for key in binding.key.split(","))
        assert f"| `{binding.id}` | {keys} | {binding.description} |" in text


def test_the_example_in_the_documents_is_a_file_that_is_taken(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "settings.md").read_text(encoding="utf-8")
    example = text.partition("```toml\n")[2].partition("```")[0]
    settings = load_settings(written(tmp_path, example))
    assert settings.theme == "light"
    assert settings.keys["app.pause"] == "space,z"

"""The command that people are told to type."""

from __future__ import annotations

from kvtui.own_command import inject_command, own_command


def test_a_command_that_the_shell_would_not_find_is_given_by_the_path_it_was_started_under(tmp_path, monkeypatch):
    script = tmp_path / "a folder" / "bin" / "kvtui"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)

    assert own_command(str(script)) == "'a folder/bin/kvtui'"
    assert own_command(".venv/bin/kvtui") == ".venv/bin/kvtui"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert own_command(str(script)) == f"'{script}'"

    monkeypatch.setenv("PATH", str(script.parent))
    assert own_command(str(script)) == "kvtui"
    assert own_command("/usr/lib/python3/site-packages/kvtui/__main__.py") == "kvtui"
    assert own_command("kvtui") == "kvtui"


def test_a_session_at_the_usual_address_needs_no_address():
    assert inject_command("http://127.0.0.1:8077", "--workload chat") == "kvtui inject --workload chat"
    assert inject_command("http://127.0.0.1:9", "x") == "kvtui inject --url http://127.0.0.1:9 x"

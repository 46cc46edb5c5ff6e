# ruff: noqa: E501 (a case a line)
from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtui.workloads.catalog import BUILTIN, load_workload
from kvtui.workloads.workload import SyntheticPrompt, WorkloadError


def written(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def error_of(folder: Path, name: str, text: str | bytes) -> str:
    with pytest.raises(WorkloadError) as raised:
        load_workload(written(folder, name, text))
    message = str(raised.value)
    assert message.startswith(str(folder / name))
    assert "\n" not in message
    return message.removeprefix(f"{folder / name}: ")


def test_a_list_of_token_ids_and_lengths_is_a_workload_that_ignores_the_end_of_text(tmp_path):
    workload = load_workload(written(tmp_path, "mixed.json", '[{"ids": [5, 6, 7], "out": 9}, {"ids": [8], "out": 2}]'))

    assert workload.name == "mixed"
    assert [session.prompt for session in workload.sessions] == [(5, 6, 7), (8,)]
    assert [session.params.max_tokens for session in workload.sessions] == [9, 2]
    assert all(session.params.ignore_eos for session in workload.sessions)


def test_the_same_requests_read_the_same_from_json_json_lines_and_toml(tmp_path):
    requests = [
        {"name": "a", "at": 0.5, "prompt": "Once", "max_tokens": 4, "temperature": 0.5, "top_k": 3, "stop": ["."]},
        {"name": "b", "at": 0.25, "system": "Be brief.", "turns": ["One?", "Two?"], "pause": 2.0, "seed": 5},
        {"name": "c", "at": 1.0, "messages": [{"role": "user", "content": "Three?"}], "stop": "!"},
    ]
    toml = "\n".join(
        "[[requests]]\n"
        + "\n".join(
            f"{key} = " + (json.dumps(value) if key != "messages" else '[{role = "user", content = "Three?"}]')
            for key, value in request.items()
        )
        for request in requests
    )
    texts = {
        "w.json": json.dumps(requests),
        "x.json": json.dumps({"requests": requests}, indent=1),
        "w.jsonl": "\n".join(json.dumps(request) for request in requests) + "\n\n",
        "w.toml": toml,
    }
    first, *others = [load_workload(written(tmp_path, name, text)).sessions for name, text in texts.items()]

    assert [session.name for session in first] == ["b", "a", "c"]
    assert first[0].conversation(["Yes."]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    assert first[1].params.stop == (".",)
    assert all(sessions == first for sessions in others)


def test_defaults_hold_for_every_request_that_does_not_say_otherwise(tmp_path):
    text = """
    {"title": "Two", "defaults": {"max_tokens": 7, "temperature": 0.5, "system": ["Line one.", "Line two."]},
     "requests": [{"turns": ["a"]}, {"turns": ["b"], "max_tokens": 3, "temperature": 0}]}
    """
    workload = load_workload(written(tmp_path, "w.json", text))

    assert workload.title == "Two"
    assert [(s.params.max_tokens, s.params.temperature) for s in workload.sessions] == [(7, 0.5), (3, 0)]
    assert workload.sessions[1].messages[0].content == "Line one.\n\nLine two."


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("w.jsonl", '{"prompt": "a"}\n{"prompt": "b", "max_token": 3}\n', "line 2: unknown field `max_token` (did you mean `max_tokens`?)"),
        ("w.jsonl", '{"prompt": "a"}\n\n{"prompt": "b", "max_tokens": "3"}\n', "line 3: field `max_tokens`: expected int"),
        ("w.json", '[\n {"prompt": "a"},\n {"prompt": "b",\n  "temperature": "hot"}\n]', "line 4: field `temperature`: expected float"),
        ("w.json", '[\n {"ids": [1, 2, "x"], "out": 1}\n]', "line 2: field `ids`: expected int"),
        ("w.json", '[\n {"ids": [1, -2], "out": 1}\n]', "line 2: field `ids`: expected int >= 0"),
        ("w.json", '{"requests": [\n {"prompt": "a",\n\n "at": -1}]}', "line 4: field `at`: expected float >= 0"),
        ("w.json", '{"defaults": {\n "max_tokens": 1.5}, "requests": [{"prompt": "a"}]}', "line 2: field `max_tokens`: expected int"),
        ("w.json", '{"defaults": {\n "prompt": "x"}, "requests": [{"prompt": "a"}]}', "line 2: unknown field `prompt`"),
        ("w.json", '{\n"tittle": "x", "requests": [{"prompt": "a"}]}', "line 2: unknown field `tittle` (did you mean `title`?)"),
        ("w.json", '{\n"title": 3, "requests": [{"prompt": "a"}]}', "line 2: field `title`: a text is expected"),
        ("w.json", '{"requests": {"prompt": "a"}}', "field `requests`: a list of requests is expected"),
        ("w.json", '[{"prompt": "a", "max_tokens": 0}]', "line 1: field `max_tokens`: max_tokens 0 is not possible"),
        ("w.json", '[{"ids": [1], "out": 0}]', "line 1: field `out`: max_tokens 0 is not possible"),
        ("w.json", '[{"ids": [1], "out": 2, "max_tokens": 3}]', "line 1: field `out`: stands for"),
        ("w.json", '[{"prompt": "a", "top_p": 7}]', "line 1: field `top_p`: top_p 7"),
        ("w.json", '[{"prompt": "a", "stop": [""]}]', "line 1: field `stop`: an empty stop string"),
        ("w.json", '[{"prompt": ""}]', "line 1: field `prompt`: is empty"),
        ("w.json", '[{"turns": []}]', "line 1: field `turns`: is empty"),
        ("w.json", '[{"max_tokens": 3}]', "line 1: a request needs one of `prompt`, `ids`, `messages` or `turns`; none is given"),
        ("w.json", '[{"prompt": "a", "turns": ["b"]}]', "`prompt` and `turns` are given"),
        ("w.json", '[{"prompt": "a",\n "system": "b"}]', "line 2: field `system`: a `prompt` is continued as it stands"),
        ("w.json", '[{"messages": [\n{"role": "robot", "content": "b"}]}]', "line 2: field `role`: `robot` is not one of"),
        ("w.json", '[{"messages": [{"role": "user"}]}]', "field `messages`: object missing required field content"),
        ("w.json", "[1]", "line 1: Expected `object`"),
        ("w.json", '[\n{"prompt": "a"},\n{"prompt": b}]', "line 3: not valid JSON"),
        ("w.json", '[\n{"prompt": "a"}\n{"prompt": "b"}]', "line 3: not valid JSON: a comma"),
        ("w.json", '[{"prompt": "a"}', "line 1: not valid JSON"),
        ("w.jsonl", '{"prompt": "a"}\n{"prompt": ', "line 2: not valid JSON"),
        ("w.json", "{", "not valid JSON"),
        ("w.json", "[" * 50_000, "nested too deeply"),
        ("w.json", '{"requests": ' + "[" * 50_000, "nested too deeply"),
        ("w.json", "", "holds no requests"),
        ("w.json", "[]", "holds no requests"),
        ("w.json", "plain words", "line 1: not valid JSON"),
        ("w.json", b"\xff\xfe\x00", "not a text file in UTF-8"),
        ("w.toml", '[[requests]]\nprompt = "a"\n\n[[requests]]\nprompt = "b"\nmax_token = 3\n', "line 6: unknown field `max_token`"),
        ("w.toml", '[[requests]]\nprompt = "a"\n\n[[requests]]\nprompt = "b"\nmax_tokens = "3"\n', "line 6: field `max_tokens`: expected int"),
        ("w.toml", '[defaults]\nseed = "x"\n[[requests]]\nprompt = "a"\n', "line 2: field `seed`: expected int"),
        ("w.toml", '[[requests]]\nprompt = \n', "line 2: not valid TOML"),
        ("w.toml", 'requests = "x"\n', "tables [[requests]] are expected"),
    ],
)  # fmt: skip
def test_a_wrong_file_gets_one_line_that_names_the_line_and_the_field(tmp_path, name, text, said):
    assert said in error_of(tmp_path, name, text)


def test_a_field_of_the_same_name_in_another_request_does_not_mislead(tmp_path):
    text = '[\n{"prompt": "max_tokens", "max_tokens": 3},\n{"prompt": "a",\n"max_tokens": null},\n{"prompt": "b",\n"max_tokens": []}]'

    assert error_of(tmp_path, "w.json", text).startswith("line 6: field `max_tokens`")


def test_what_is_neither_a_name_nor_a_file_is_told_with_the_names(tmp_path):
    with pytest.raises(WorkloadError, match=r"no workload 'chatt': .*chat, rag, burst, long"):
        load_workload("chatt")
    with pytest.raises(WorkloadError, match=r"stream has no end, and only `kvtui run` makes it: .*chat, rag"):
        load_workload("stream")
    with pytest.raises(WorkloadError, match="is a folder"):
        load_workload(str(tmp_path))


def test_a_file_larger_than_the_limit_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtui.workloads.file_format.MAX_FILE_BYTES", 2**20)

    assert "larger than 1 MiB" in error_of(tmp_path, "w.json", b" " * (2**20 + 1))


def test_an_azure_trace_gives_arrivals_and_lengths(tmp_path):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.2299600,3,0\r\n"
    )
    workload = load_workload(written(tmp_path, "azure.csv", text))

    assert [session.at for session in workload.sessions] == [0.0, 0.25]
    assert [session.prompt.num_tokens for session in workload.sessions] == [4808, 3]
    assert [session.params.max_tokens for session in workload.sessions] == [10, 1]
    first, second = (session.prompt.token_ids(1000) for session in workload.sessions)
    assert first[:3] != second


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TIMESTAMP,ContextTokens\n", "line 1: no column `GeneratedTokens`"),
        ("a,b,c\n1,2,3\n", "line 1: no column `TIMESTAMP`"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,3\n", "line 2: field `ContextTokens`: 'x'"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,3,-3\n",
            "line 2: field `GeneratedTokens`: '-3'",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,3\n", "line 2: field `TIMESTAMP`: 'noon' is not a time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n", "line 2: 2 columns where 3 are expected"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
    ],
)
def test_a_wrong_azure_trace_is_told_by_line_and_column(tmp_path, text, said):
    assert said in error_of(tmp_path, "azure.csv", text)


def test_equal_hash_ids_of_a_mooncake_trace_give_equal_prefixes(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 1300, "output_length": 6, "hash_ids": [0, 1, 3]},
        {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [4, 1]},
    ]
    workload = load_workload(written(tmp_path, "trace.jsonl", "\n".join(map(json.dumps, lines))))
    first, second, third = (session.prompt.token_ids(5000) for session in workload.sessions)

    assert [session.at for session in workload.sessions] == [0.0, 1.5, 3.0]
    assert [len(ids) for ids in (first, second, third)] == [1100, 1300, 600]
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert third[:512] != first[:512]
    assert all(0 <= token_id < 5000 for token_id in first + second + third)


def test_a_wrong_mooncake_trace_is_told_by_line_and_field(tmp_path):
    good = '{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [0]}\n'
    for line, said in (
        ('{"timestamp": 0, "input_length": "9", "output_length": 5}', "line 2: field `input_length`"),
        ('{"timestamp": 0, "input_length": 9}', "line 2: field `output_length`"),
        ('{"timestamp": 0, "input_length": 9, "output_length": -5}', "line 2: field `output_length`"),
        ('{"timestamp": 0, ', "line 2: not valid JSON"),
    ):
        assert said in error_of(tmp_path, "trace.jsonl", good + line)


def test_scaling_shrinks_lengths_and_keeps_shared_prefixes(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 5120, "output_length": 100, "hash_ids": list(range(10))},
        {"timestamp": 0, "input_length": 5120, "output_length": 400, "hash_ids": [*range(5), *range(20, 25)]},
    ]
    workload = load_workload(written(tmp_path, "trace.jsonl", "\n".join(map(json.dumps, lines))))
    scaled = workload.fitted(2048, length_scale=0.1)
    first, second = (session.prompt.token_ids(5000) for session in scaled.sessions)

    assert len(first) == len(second) == 512
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    assert shared == 5 * 51
    assert [session.params.max_tokens for session in scaled.sessions] == [10, 40]
    assert scaled.notes == ()


def test_what_is_longer_than_the_model_takes_is_cut_at_its_end_and_told(tmp_path):
    text = json.dumps([{"ids": list(range(500)), "out": 300}, {"ids": [1, 2], "out": 3}])
    cut = load_workload(written(tmp_path, "w.json", text)).fitted(400)

    assert cut.sessions[0].prompt == tuple(range(300))
    assert cut.sessions[0].params.max_tokens == 100
    assert cut.sessions[1].prompt == (1, 2)
    assert cut.notes == (
        "1 of 2 requests of w were cut to the 400 tokens that the model takes (--length-scale F shrinks all alike)",
    )


@pytest.mark.parametrize("name", BUILTIN)
def test_every_built_in_workload_says_what_it_shows_and_is_all_text(name):
    workload = load_workload(name)

    assert workload.name == name
    assert len(workload.title) > 20
    assert all(session.messages and session.prompt is None for session in workload.sessions)
    assert len({session.name for session in workload.sessions}) == len(workload.sessions)


def test_the_built_in_workloads_are_what_their_names_say():
    chat, rag, burst, long = (load_workload(name) for name in ("chat", "rag", "burst", "long"))

    assert all(session.num_requests >= 3 for session in chat.sessions)
    assert len({session.messages[0].content for session in rag.sessions}) == 1
    assert 600 <= len(rag.sessions[0].messages[0].content.split()) <= 900
    assert len(burst.sessions) == 40
    assert burst.sessions[-1].at < 5
    lengths = sorted(len(session.messages[-1].content) for session in long.sessions)
    assert lengths[-1] > 20 * lengths[-2]


BESIDE_CHECKOUT = Path(__file__).resolve().parents[3]


def sample(name: str) -> Path | None:
    return next(iter(sorted(BESIDE_CHECKOUT.glob(f"*/workloads/{name}"))), None)


@pytest.mark.parametrize(
    ("name", "sessions"),
    [("azure_llm_2023_code.csv", 8819), ("mooncake_conversation_2000.jsonl", 2000), ("mixed32.json", 32)],
)
def test_whole_public_files_are_read(name, sessions):
    path = sample(name)
    if path is None:
        pytest.skip(f"{name} lies in no workloads folder beside the checkout")
    workload = load_workload(str(path)).fitted(2048)

    assert len(workload.sessions) == sessions
    longest = max(
        (s.prompt.num_tokens if isinstance(s.prompt, SyntheticPrompt) else len(s.prompt)) + s.params.max_tokens
        for s in workload.sessions
    )
    assert longest <= 2048


def test_the_documented_example_is_a_workload(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "workloads.md").read_text()
    example = page.split("```json\n")[1].split("```")[0]
    workload = load_workload(written(tmp_path, "example.json", example))

    assert workload.title == "Two callers"
    assert [(s.name, s.num_requests, s.params.max_tokens) for s in workload.sessions] == [
        ("tides", 2, 64),
        ("story", 1, 200),
        ("ids", 1, 20),
    ]

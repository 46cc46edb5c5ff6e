from __future__ import annotations

import json
from typing import Any

import pytest

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


def refused(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    assert "\n" not in error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHAT, {"messages": MESSAGES, "n": 0}, "n", "ask for 1 to 128"),
        (CHAT, {"messages": MESSAGES, "logprobs": True}, "logprobs", "not supported"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "not supported"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "at least 1"),
        (CHAT, {"messages": MESSAGES, "max_tokens": "ten"}, "max_tokens", "int"),
        (CHAT, {"messages": MESSAGES, "temperature": -1}, "temperature", "0 (greedy) or more"),
        (CHAT, {"messages": MESSAGES, "top_p": 0}, "top_p", "at most 1"),
        (CHAT, {"messages": MESSAGES, "stop": [""]}, "stop", "empty stop string"),
        (CHAT, {"messages": MESSAGES, "stop": ["x" * 300]}, "stop", "256 characters"),
        (CHAT, {"messages": []}, "messages", "is empty"),
        (CHAT, {}, "messages", "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "messages", "'robot'"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages[0]", "role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        (COMPLETE, {"prompt": ""}, "prompt", "is empty"),
        (COMPLETE, {"prompt": []}, "prompt", "is empty"),
        (COMPLETE, {"prompt": ["a", "b"]}, "prompt", "one prompt"),
        (COMPLETE, {"prompt": [1, 10_000_000]}, "prompt", "10000000 is not a token id"),
        (COMPLETE, {"prompt": [-1]}, "prompt", "-1 is not a token id"),
        (COMPLETE, {}, "prompt", "prompt"),
    ],
)
def test_a_wrong_field_is_named(served, path, body, param, said):
    error = refused(served.http.post(path, json=body))

    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(served, body):
    answer = served.http.post(CHAT, content=body, headers={"content-type": "application/json"})

    assert "JSON" in refused(answer)["message"]


def test_unknown_fields_and_nulls_are_ignored(served):
    body = {"messages": MESSAGES, "max_tokens": 3, "seed": None, "stop": None, "wizardry": {"level": 9}, "n": 1}

    assert served.http.post(CHAT, json=body).json()["usage"]["completion_tokens"] == 3


def test_text_parts_are_joined(served):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    joined = served.http.post(CHAT, json={"messages": [{"role": "user", "content": parts}], "temperature": 0}).json()
    plain = served.http.post(CHAT, json={"messages": MESSAGES, "temperature": 0}).json()

    assert joined["choices"][0]["message"] == plain["choices"][0]["message"]


def test_what_can_never_fit_is_refused_with_the_numbers_also_as_a_stream(serve):
    served = serve(num_blocks=4, max_model_len=4096)
    body = {"prompt": "the block " * 200, "max_tokens": 4}

    for stream in (False, True):
        error = refused(served.http.post(COMPLETE, json=body | {"stream": stream}))
        assert "4" in error["message"]
        assert "block" in error["message"]
    assert served.http.post(COMPLETE, json={"prompt": "the block", "max_tokens": 4}).status_code == 200


def test_what_is_longer_than_the_model_takes_is_refused_with_the_limit(serve):
    served = serve(max_model_len=64)

    error = refused(served.http.post(COMPLETE, json={"prompt": "the block " * 100, "max_tokens": 4}))
    assert "64" in error["message"]


def test_a_chat_without_max_tokens_gets_the_room_that_is_left(serve):
    served = serve(max_model_len=64)
    usage = served.http.post(CHAT, json={"messages": MESSAGES, "ignore_eos": True}).json()["usage"]

    assert usage["total_tokens"] == 64


def test_a_body_larger_than_the_limit_is_refused(served):
    answer = served.http.post(COMPLETE, json={"prompt": "x" * (5 * 2**20)})

    assert "larger than 4 MiB" in refused(answer, 413)["message"]


def test_a_body_that_lies_about_its_length_is_cut_off(served):
    def endless() -> Any:
        for _ in range(200):
            yield b"x" * 2**16

    answer = served.http.post(COMPLETE, content=endless(), headers={"content-type": "application/json"})
    assert "larger than 4 MiB" in refused(answer, 413)["message"]


def test_a_form_is_refused(served):
    answer = served.http.post(COMPLETE, data={"prompt": "x"})

    assert "Content-Type: application/json" in refused(answer, 415)["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", CHAT, 405)])
def test_a_wrong_address_or_method_gets_the_same_form_of_error(served, method, path, status):
    assert path in refused(served.http.request(method, path), status)["message"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8077", "127.0.0.1.evil.example", "", "[::", "192.168.1.5"]
)
def test_a_host_name_that_is_not_the_loopback_is_refused(served, host):
    refused(served.http.get("/v1/models", headers={"host": host}), 403)


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:8077", "[::1]:8077"])
def test_the_loopbacks_names_are_served(served, host):
    assert served.http.get("/v1/models", headers={"host": host}).status_code == 200


def test_a_page_of_another_site_is_refused_and_a_local_one_is_served(served):
    refused(served.http.post(CHAT, json={"messages": MESSAGES}, headers={"origin": "https://evil.example"}), 403)
    refused(served.http.post(CHAT, json={"messages": MESSAGES}, headers={"origin": "null"}), 403)
    local = served.http.post(
        CHAT, json={"messages": MESSAGES, "max_tokens": 2}, headers={"origin": "http://localhost:3000"}
    )

    assert local.status_code == 200
    assert "access-control-allow-origin" not in local.headers


def test_a_token_is_asked_for_where_there_is_one(serve):
    served = serve(token="opensesame")

    assert "Bearer" in refused(served.http.get("/v1/models"), 401)["message"]
    for wrong in ("Bearer opensesam", "Bearer", "Basic opensesame", "Bearer \u00fcber"):
        refused(served.http.get("/v1/models", headers={"authorization": wrong.encode("latin-1")}), 401)
    assert served.http.get("/v1/models", headers={"authorization": "Bearer opensesame"}).status_code == 200
    assert served.http.get("/health").status_code == 200


def test_an_error_inside_is_told_without_a_traceback(served, monkeypatch, caplog):
    def broken(*args: Any, **settings: Any) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(served.engine, "add_request", broken)
    answer = served.http.post(COMPLETE, json={"prompt": "x"})

    assert refused(answer, 500)["type"] == "server_error"
    assert "secret" not in answer.text
    assert "secret detail" in caplog.text


def test_the_models_card_tells_what_an_injector_needs(served):
    (card,) = served.http.get("/v1/models").json()["data"]

    assert card["id"] == "simulated"
    assert card["max_model_len"] == 512
    assert card["vocab_size"] == served.engine.header.model.vocab_size
    assert served.http.get("/v1/models/simulated").json() == card
    refused(served.http.get("/v1/models/other"), 404)


def test_health_tells_when_the_engine_has_ended(serve):
    why: list[str] = []
    served = serve(failure=lambda: why[0] if why else None)
    assert served.http.get("/health").json()["status"] == "ok"

    why.append("RuntimeError: out of luck")
    answer = served.http.get("/health")
    assert answer.status_code == 503
    assert answer.json() == {"status": "failed", "error": "RuntimeError: out of luck"}


def test_a_request_does_not_wait_for_an_engine_that_has_ended(serve):
    served = serve(start_loop=False, failure=lambda: "RuntimeError: out of luck")
    answer = served.http.post(COMPLETE, json={"prompt": "x"})

    assert "out of luck" in refused(answer, 503)["message"]


def test_a_failure_in_the_middle_of_a_stream_is_an_event(serve):
    why: list[str] = []
    served = serve(seconds_per_step=0.02, failure=lambda: why[0] if why else None)
    with served.http.stream("POST", COMPLETE, json={"prompt": "x", "max_tokens": 400, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        served.loop.stop()
        why.append("RuntimeError: out of luck")
        last = [line for line in lines if line][-1]

    assert "out of luck" in json.loads(last.removeprefix("data: "))["error"]["message"]

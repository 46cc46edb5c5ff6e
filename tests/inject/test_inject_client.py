from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from engine.request import SamplingParams
from kvtui.inject.client import Client, Outcome, Server, ServerError, request_body
from kvtui.inject.drive import send_workload
from kvtui.workloads.workload import Message, Session, SyntheticPrompt, Workload

SERVER = Server("m", 5000, 512)


def chat(name: str = "a", at: float = 0.0, *follow_ups: str, pause: float = 0.0, **params: Any) -> Session:
    params = {"max_tokens": 8} | params
    return Session(
        name, at, SamplingParams(**params), messages=(Message("user", "hi"),), follow_ups=follow_ups, pause=pause
    )


async def send(url: str, *sessions: Session) -> list[Outcome]:
    outcomes: list[Outcome] = []
    async with Client(url) as client:
        await send_workload(client, await client.server(), Workload("w", "", sessions), outcomes.append)
    return outcomes


def sse(*events: object) -> bytes:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


async def ask_of(handler: Any) -> Outcome:
    async with Client("http://test", transport=httpx.MockTransport(handler)) as client:
        return await client.ask(chat(), [], SERVER)


async def test_it_learns_the_model_from_the_server(session_url):
    async with Client(session_url) as client:
        server = await client.server()
    async with Client(session_url + "/v1/") as client:
        assert await client.server() == server

    assert server.model == "simulated"
    assert server.max_model_len == 512
    assert server.vocab_size > 256


async def test_every_turn_is_answered_and_counted(session_url):
    outcomes = await send(session_url, chat("a", 0.0, "more", "and more"), chat("b"))

    assert sorted(outcome.name for outcome in outcomes) == ["a turn 1", "a turn 2", "a turn 3", "b"]
    assert all(outcome.error is None and outcome.output_tokens == 8 for outcome in outcomes)
    assert all(0 < outcome.ttft <= outcome.latency for outcome in outcomes)
    turns = sorted((o for o in outcomes if o.name.startswith("a")), key=lambda o: o.name)
    assert turns[0].last <= turns[1].sent < turns[1].last <= turns[2].sent
    assert turns[2].cached_tokens > 0


async def test_arrival_times_and_pauses_are_kept(session_url):
    began = time.monotonic()
    outcomes = await send(session_url, chat("now"), chat("later", 0.3), chat("talk", 0.0, "more", pause=0.2))
    sent = {outcome.name: outcome.sent - began for outcome in outcomes}
    ended = {outcome.name: outcome.last - began for outcome in outcomes}

    assert sent["later"] - sent["now"] >= 0.25
    assert sent["talk turn 2"] - ended["talk turn 1"] >= 0.19


async def test_a_failed_request_is_an_outcome_and_ends_its_session(session_url):
    too_long = Session("long", 0.0, SamplingParams(max_tokens=8), prompt=tuple([1] * 600), follow_ups=("more",))
    outcomes = await send(session_url, too_long, chat("b"))
    by_name = {outcome.name: outcome for outcome in outcomes}

    assert set(by_name) == {"long turn 1", "b"}
    assert "512" in by_name["long turn 1"].error
    assert by_name["b"].error is None


async def test_nothing_there_is_one_line_that_says_how_to_start_a_session():
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(ServerError, match=r"nothing answers at http://127.0.0.1:9: start a session .* `kvtui run`"):
            await client.server()
    async with Client("not a url") as client:
        with pytest.raises(ServerError, match="cannot be used"):
            await client.server()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b'{"error": {"message": "a token is needed"}}', "a token is needed .*--token"),
        (404, b"<html>", "not a server of the OpenAI form: /v1/models answered 404"),
        (200, b'{"data": []}', "not a server of the OpenAI form"),
        (200, b'{"data": [{"id": "x", "vocab_size": "many"}]}', "not a server of the OpenAI form"),
    ],
)
async def test_a_server_of_another_kind_is_told_apart(status, body, said):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
    async with Client("http://test", transport=transport) as client:
        with pytest.raises(ServerError, match=said):
            await client.server()


async def test_a_token_is_sent_with_every_request():
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, content=sse("[DONE]"))

    async with Client("http://test", "opensesame", httpx.MockTransport(handler)) as client:
        await client.ask(chat(), [], SERVER)
    assert seen == ["Bearer opensesame"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "too long"),
        (httpx.Response(502, content=b"bad gateway"), "bad gateway"),
        (httpx.Response(500), "HTTP status 500"),
        (httpx.Response(200, content=sse({"choices": [{"text": "x"}]})), "ended the answer early"),
        (httpx.Response(200, content=sse({"error": {"message": "out of luck"}})), "out of luck"),
        (httpx.Response(200, content=sse("{")), "not JSON"),
        (httpx.Response(200, content=b""), "ended the answer early"),
    ],
)
async def test_what_the_server_does_wrong_becomes_the_outcomes_error(answer, said):
    assert said in (await ask_of(lambda request: answer)).error


async def test_a_connection_that_breaks_becomes_the_outcomes_error():
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset by peer")

    assert (await ask_of(broken)).error == "connection lost: reset by peer"


async def test_the_first_text_starts_the_answer_and_not_the_role():
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Yes"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}},
    ]

    async def slowly() -> Any:
        for event in events:
            await asyncio.sleep(0.05)
            yield sse(event)
        yield sse("[DONE]")

    outcome = await ask_of(lambda request: httpx.Response(200, content=slowly()))

    assert outcome.text == ["Yes"]
    assert outcome.ttft >= 0.09
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (9, 3, 0)


def test_a_body_says_what_the_session_says_and_no_more():
    path, body = request_body(chat(temperature=0.5, top_k=4, seed=3, stop=(".",)), [], SERVER)

    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["model"], body["temperature"], body["top_k"], body["seed"], body["stop"]) == ("m", 0.5, 4, 3, ["."])
    assert body["stream_options"] == {"include_usage": True}
    assert not {"min_p", "ignore_eos", "cache_salt"} & set(body)

    path, body = request_body(Session("x", 0.0, SamplingParams(ignore_eos=True), prompt=SyntheticPrompt(9)), [], SERVER)
    assert path == "/v1/completions"
    assert len(body["prompt"]) == 9
    assert body["ignore_eos"] is True


async def test_a_session_that_is_still_loading_is_told_apart_from_none():
    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("no answer", request=request)

    async with Client("http://test", transport=httpx.MockTransport(silent)) as client:
        with pytest.raises(ServerError, match="still loading its model"):
            await client.server()

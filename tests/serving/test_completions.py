from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

SAY = {"messages": [{"role": "user", "content": "Which block is free?"}], "max_tokens": 12, "temperature": 0}


def events_of(text: str) -> list[Any]:
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def client_of(served: Any, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=more.pop("api_key", "none"), max_retries=0, **more)


def test_a_chat_answer_has_the_openai_form_and_counts_its_tokens(served):
    answer = served.http.post("/v1/chat/completions", json=SAY).json()

    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "simulated"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens"] == len(served.engine.codec.encode_chat(SAY["messages"]))
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


def test_a_streamed_answer_is_the_answer_in_one_piece(served):
    whole = served.http.post("/v1/chat/completions", json=SAY).json()
    streamed = served.http.post(
        "/v1/chat/completions", json=SAY | {"stream": True, "stream_options": {"include_usage": True}}
    )
    events = events_of(streamed.text)

    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    chunks = [event for event in events[:-1] if event["choices"]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [
        "length"
    ]
    assert len({event["id"] for event in events[:-1]}) == 1
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 12


def test_several_choices_come_whole_and_streamed_and_the_prompt_counts_once(served):
    ask = {"prompt": "the block is free", "n": 3, "temperature": 1.0, "seed": 4, "max_tokens": 7}
    whole = served.http.post("/v1/completions", json=ask).json()
    single = [
        served.http.post("/v1/completions", json=ask | {"n": 1, "seed": 4 + index}).json()["choices"][0]["text"]
        for index in range(3)
    ]
    events = events_of(
        served.http.post("/v1/completions", json=ask | {"stream": True, "stream_options": {"include_usage": True}}).text
    )

    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in whole["choices"]] == single
    assert len(set(single)) == 3
    prompt_tokens = len(served.engine.codec.encode("the block is free"))
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (prompt_tokens, 21)
    streamed = ["", "", ""]
    for event in events[:-2]:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == single
    assert sum(event["choices"][0]["finish_reason"] is not None for event in events[:-2]) == 3
    assert events[-2]["usage"]["completion_tokens"] == 21
    assert events[-1] == "[DONE]"


def test_a_streamed_chat_names_the_role_of_every_choice(served):
    events = events_of(served.http.post("/v1/chat/completions", json=SAY | {"stream": True, "n": 2}).text)
    choices = [event["choices"][0] for event in events[:-1]]
    assert sorted(choice["index"] for choice in choices if "role" in choice["delta"]) == [0, 1]
    texts = ["".join(c["delta"].get("content", "") for c in choices if c["index"] == index) for index in (0, 1)]
    assert texts[0] == texts[1]  # greedy


def test_a_stream_has_no_usage_unless_it_is_asked_for(served):
    events = events_of(served.http.post("/v1/completions", json={"prompt": "the block", "stream": True}).text)

    assert events[-1] == "[DONE]"
    assert all("usage" not in event for event in events[:-1])


def test_a_completion_takes_text_or_token_ids_and_16_tokens_by_default(served):
    ids = served.engine.codec.encode("the block is free")
    bodies = [
        {"prompt": prompt, "temperature": 0} for prompt in ("the block is free", ids, [ids], ["the block is free"])
    ]
    answers = [served.http.post("/v1/completions", json=body).json() for body in bodies]

    assert {answer["object"] for answer in answers} == {"text_completion"}
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {16}


def test_a_repeated_prefix_is_reported_as_cached(served):
    prompt = "the block and the page and the token " * 10
    first = served.http.post("/v1/completions", json={"prompt": prompt}).json()["usage"]
    second = served.http.post("/v1/completions", json={"prompt": prompt}).json()["usage"]

    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["prompt_tokens"]
    assert cached % served.engine.header.block_size == 0


def test_a_cache_salt_keeps_prefixes_apart(served):
    prompt = "the block and the page and the token " * 10
    served.http.post("/v1/completions", json={"prompt": prompt, "cache_salt": "mine"})
    other = served.http.post("/v1/completions", json={"prompt": prompt, "cache_salt": "yours"}).json()["usage"]

    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(served):
    free = served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 60, "temperature": 0}).json()
    text = free["choices"][0]["text"]
    word = text.split(" ")[4]
    stopped = served.http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 60, "temperature": 0, "stop": [f" {word}"]}
    ).json()["choices"][0]

    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(f" {word}")]


def test_an_equal_seed_gives_an_equal_answer_and_another_seed_another(served):
    def ask(seed: int) -> str:
        body = {"prompt": "the pool", "temperature": 0.8, "seed": seed, "max_tokens": 24}
        return str(served.http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    assert ask(7) == ask(7)
    assert ask(7) != ask(8)


def test_the_request_carries_the_callers_name_into_the_trace(serve):
    served = serve(start_loop=False)
    arrived = []
    served.engine.add_sink(lambda message: arrived.append(getattr(message, "name", None)))
    served.loop.start()
    served.http.post("/v1/chat/completions", json=SAY | {"metadata": {"name": "my-request"}, "user": "someone"})
    served.http.post("/v1/chat/completions", json=SAY | {"user": "someone"})

    assert [name for name in arrived if name] == ["my-request", "someone"]


def test_the_openai_client_drives_it(served):
    client = client_of(served)
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(
        model=model, messages=SAY["messages"], max_completion_tokens=9, temperature=0, top_p=0.9, seed=3
    )
    stream = client.chat.completions.create(
        model=model,
        messages=SAY["messages"],
        max_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 20, "ignore_eos": True},
    )
    chunks = list(stream)
    completion = client.completions.create(model=model, prompt="the free queue", max_tokens=5)

    assert model == "simulated"
    assert whole.usage.completion_tokens == 9
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 9
    assert completion.usage.completion_tokens == 5


def test_the_openai_client_sees_what_it_did_wrong(served):
    client = client_of(served)

    with pytest.raises(openai.BadRequestError, match="n 1000 is not possible") as wrong:
        client.chat.completions.create(model="simulated", messages=SAY["messages"], n=1000)
    assert wrong.value.param == "n"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; 'simulated' is"):
        client.chat.completions.create(model="gpt-4", messages=SAY["messages"])


def test_many_streams_at_once_each_get_their_own_answer(serve):
    served = serve(num_blocks=40)

    def ask(number: int) -> tuple[str, str]:
        body = {"prompt": f"{number} the block " * 6, "max_tokens": 30, "temperature": 0}
        streamed = served.http.post("/v1/completions", json=body | {"stream": True})
        text = "".join(event["choices"][0]["text"] for event in events_of(streamed.text)[:-1])
        return text, served.http.post("/v1/completions", json=body).json()["choices"][0]["text"]

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(ask, range(12)))

    assert all(streamed == whole for streamed, whole in answers)
    assert len({whole for _, whole in answers}) == 12


def test_a_client_that_leaves_frees_its_request(serve):
    served = serve(seconds_per_step=0.01)
    body = {"prompt": "the block", "max_tokens": 400, "ignore_eos": True}
    with served.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        next(answer.iter_lines())
        assert served.engine.scheduler.running
    with pytest.raises(Exception, match="timed out"):
        served.http.post("/v1/completions", json=body, timeout=0.3)

    deadline = time.monotonic() + 5
    while (served.engine.scheduler.running or served.engine.scheduler.waiting) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not served.engine.scheduler.running
    assert served.http.get("/health").json()["open_requests"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_request_came_to_before_it_outgrew_the_pool_is_answered_as_cut_at_its_length(serve, path, stream):
    served = serve(num_blocks=6)
    ask = {"max_tokens": 400, "ignore_eos": True, "stream": stream}
    ask |= {"prompt": "the block"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    answer = served.http.post(path, json=ask)

    assert answer.status_code == 200
    if stream:
        events = events_of(answer.text)
        assert events[-1] == "[DONE]"
        assert [c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]] == ["length"]
        assert len(events) > 5
    else:
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "length"
        assert len(choice.get("text") or choice["message"]["content"]) > 50
        assert 0 < answer.json()["usage"]["completion_tokens"] <= 6 * 16

import pytest

from engine.request import FinishReason, Request, RequestError, RequestStatus, SamplingParams


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens 0 is not possible: ask for at least 1"),
        ({"max_tokens": -3}, "max_tokens -3"),
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.01}, "top_p 1.01"),
        ({"top_p": float("nan")}, "top_p nan"),
        ({"min_p": -0.1}, "min_p -0.1"),
        ({"min_p": 1.1}, "min_p 1.1"),
        ({"stop": ("a", "")}, "empty stop string"),
    ],
)
def test_impossible_parameters_are_named_with_what_is_possible(params: dict[str, object], message: str):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)  # type: ignore[arg-type]


def test_the_edges_of_what_is_possible_are_taken():
    SamplingParams(max_tokens=1, temperature=0.0, top_k=0, top_p=1.0, min_p=1.0)


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_has_a_status_that_has_ended(reason: FinishReason):
    assert reason.status.is_finished


def test_waiting_running_and_preempted_requests_have_not_ended():
    live = [status for status in RequestStatus if not status.is_finished]
    assert live == [RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED]


def test_known_tokens_are_read_across_prompt_and_output():
    request = Request(0, "", [10, 11, 12], SamplingParams())
    request.output_token_ids += [20, 21]
    everything = [10, 11, 12, 20, 21]
    assert request.num_tokens == 5
    assert [request.token_at(i) for i in range(5)] == everything
    for start in range(6):
        for stop in range(start, 6):
            assert request.tokens(start, stop) == everything[start:stop]

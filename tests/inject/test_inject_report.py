from __future__ import annotations

import json

import pytest

from kvtui.inject.client import Outcome
from kvtui.inject.report import as_json, as_text, percentile, summarise


def outcome(sent: float, first: float, last: float, tokens: int, error: str | None = None) -> Outcome:
    return Outcome("x", sent, first, last, prompt_tokens=20, cached_tokens=5, output_tokens=tokens, error=error)


def test_percentiles_are_linear_between_neighbours():
    assert percentile([4.0], 99) == 4.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([10.0, 20.0], 90) == pytest.approx(19.0)
    assert percentile(list(range(101)), 99) == pytest.approx(99.0)


def test_the_report_is_over_the_requests_that_succeeded():
    report = summarise("w", [outcome(0, 1, 3, 11), outcome(1, 1.5, 4.5, 31), outcome(0, 0.1, 9.5, 7, "lost")])

    assert (report.requests, report.completed, report.failed) == (3, 2, 1)
    assert report.wall_s == 9.5
    assert report.output_tokens == 42
    assert report.output_tokens_per_s == pytest.approx(42 / 9.5, abs=0.01)
    assert (report.prompt_tokens, report.cached_tokens) == (40, 10)
    assert report.ttft_ms.mean == 750
    assert report.tpot_ms.p50 == pytest.approx((200 + 100) / 2)
    assert report.e2e_ms.p90 == pytest.approx(3450)
    assert report.errors == {"lost": 1}


def test_an_answer_of_one_token_has_no_time_per_token():
    report = summarise("w", [outcome(0, 1, 1, 1)])

    assert report.tpot_ms is None
    assert "time per output token" not in as_text(report)
    assert "time to first token" in as_text(report)


def test_a_report_of_failures_alone_is_still_a_report():
    report = summarise("w", [outcome(0, 1, 2, 3, "lost"), outcome(0, 1, 2, 3, "lost")])

    assert "0 of 2 requests answered" in as_text(report)
    assert json.loads(as_json(report))["errors"] == {"lost": 2}


def test_the_text_names_throughput_and_the_shares():
    text = as_text(summarise("burst", [outcome(0, 0.25, 2.25, 21)]))

    assert text.startswith("burst: 1 of 1 requests answered in 2.2 s, 0 failed")
    assert "25.0% from the prefix cache" in text
    assert "9.3 tok/s" in text
    assert "250.0 ms" in text
    assert "2.25 s" in text

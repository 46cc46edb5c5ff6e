from __future__ import annotations

import itertools
import statistics

import pytest

from engine.request import SamplingParams
from kvtui.workloads.workload import Session, SyntheticPrompt, Workload, WorkloadError


def of(count: int, **params: object) -> Workload:
    sessions = tuple(
        Session(name=f"s{i}", at=float(i), prompt="x", params=SamplingParams(**params))  # type: ignore[arg-type]
        for i in range(count)
    )
    return Workload("w", "", sessions)


def test_poisson_arrivals_have_the_rates_gaps_and_are_the_same_for_a_seed():
    times = [session.at for session in of(4000).arriving("poisson", 5.0, seed=3).sessions]
    gaps = [b - a for a, b in itertools.pairwise(times)]

    assert times[0] == 0
    assert times == sorted(times)
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)  # of an exponential: its mean
    assert times == [session.at for session in of(4000).arriving("poisson", 5.0, seed=3).sessions]
    assert times != [session.at for session in of(4000).arriving("poisson", 5.0, seed=4).sessions]


def test_constant_arrivals_are_evenly_spaced_and_a_burst_comes_at_once():
    assert [s.at for s in of(4).arriving("constant", 4.0).sessions] == [0, 0.25, 0.5, 0.75]
    assert {s.at for s in of(4).arriving("burst", 0.0).sessions} == {0.0}


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_not_positive_is_refused(rate):
    with pytest.raises(WorkloadError, match="rate"):
        of(2).arriving("poisson", rate)


def test_taking_more_sessions_than_there_are_starts_over_later_under_new_names():
    taken = of(3).take(7).sessions

    assert [session.name for session in taken] == ["s0", "s1", "s2", "s0/2", "s1/2", "s2/2", "s0/3"]
    assert [session.at for session in taken] == [0, 1, 2, 3, 4, 5, 6]
    assert len(of(3).take(2).sessions) == 2


def test_seeds_are_given_to_sampled_sessions_that_have_none():
    sampled = of(3, temperature=0.5).seeded(1).sessions
    seeds = [session.params.seed for session in sampled]

    assert len(set(seeds)) == 3
    assert seeds == [session.params.seed for session in of(3, temperature=0.5).seeded(1).sessions]
    assert seeds != [session.params.seed for session in of(3, temperature=0.5).seeded(2).sessions]
    assert of(1, temperature=0.5, seed=9).seeded(1).sessions[0].params.seed == 9
    assert of(1).seeded(1).sessions[0].params.seed is None


@pytest.mark.parametrize("vocab_size", [2, 50, 300, 50_000])
def test_synthetic_tokens_are_in_the_vocabulary_whatever_its_size(vocab_size):
    ids = SyntheticPrompt(700, (1,)).token_ids(vocab_size)

    assert len(ids) == 700
    assert all(0 <= token_id < vocab_size for token_id in ids)

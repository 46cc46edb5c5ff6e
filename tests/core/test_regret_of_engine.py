"""Regret as the trace tells it, against what the engine really lost: its own digests, over random schedules."""

import random

import pytest
from followed_engine import Followed, config_of

from engine.core.block_hash import trace_key
from engine.request import SamplingParams
from engine.trace.latency import end_of, latency_of


class Truth:
    """What the engine evicted and looked for, noted at its own functions."""

    def __init__(self, followed: Followed) -> None:
        self.followed = followed
        self.kv = followed.engine.scheduler.kv
        self.evicted: dict[int, int] = {}
        self.missed: dict[int, set[int]] = {}
        pool, evict = self.kv.pool, self.kv.pool._evict

        def noted(block) -> None:
            if block.block_hash is not None:
                key = trace_key(block.block_hash)
                self.evicted.pop(key, None)
                self.evicted[key] = followed.state.step + 1
            evict(block)

        pool._evict = noted  # type: ignore[method-assign]
        look = self.kv.get_computed_blocks

        def looked(request):
            hits = look(request)
            number = request.request_id
            if number in followed.engine.scheduler.waiting and not request.num_preemptions:
                digests = self.kv._digests_up_to(request, (request.num_tokens - 1) // self.kv.block_size)
                gone = {trace_key(digest) for digest in digests[len(hits.blocks) :] if pool.find(digest) is None}
                self.missed[number] = gone & self.evicted.keys()
            return hits

        self.kv.get_computed_blocks = looked  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(8))
def test_what_a_prompt_computes_again_is_what_it_looked_for_and_the_engine_had_evicted(seed: int) -> None:
    rng = random.Random(seed)
    followed = Followed(config_of(4, rng.choice((12, 18, 26)), max_num_seqs=3, max_prefill_chunk=rng.choice((0, 8))))
    truth = Truth(followed)
    followed.state._max_evicted = 10**6  # everything is remembered: what a prompt evicts itself may be what it lost
    documents = [[50 * d + i for i in range(rng.randint(9, 24))] for d in range(1, 5)]
    asked = []
    for _ in range(24):
        prompt = rng.choice(documents) + [rng.randrange(40) for _ in range(rng.randint(0, 6))]
        asked.append(followed.engine.add_request(prompt, SamplingParams(max_tokens=rng.randint(1, 8))))
        followed.step(rng.randint(0, 6))
    followed.run()
    state = followed.state
    regrets = 0
    for number in asked:
        request = state.requests[number]
        latency = latency_of(request, end_of(state))
        assert sum(latency.parts) == latency.total_ns
        if request.preemptions:
            assert request.regret_blocks <= len(truth.missed[number])
            continue
        assert request.regret_blocks == len(truth.missed.get(number, ())), number
        regrets += request.regret_blocks
    assert sum(request.regret_blocks for request in state.requests.values()) == state.regret_blocks
    assert regrets > 0


def test_the_blocks_that_are_taken_next_are_those_of_the_engines_own_queue() -> None:
    followed = Followed(config_of(4, 14, max_num_seqs=4))
    rng = random.Random(3)
    for _ in range(30):
        prompt = [rng.randrange(3) for _ in range(rng.randint(3, 20))]
        followed.engine.add_request(prompt, SamplingParams(max_tokens=rng.randint(1, 12)))
        followed.step(rng.randint(1, 5))
        queue = [block.block_id for block in followed.engine.scheduler.kv.pool.free_queue]
        assert followed.state.free_queue(100).tolist() == queue
        assert followed.state.free_queue(4).tolist() == queue[:4]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_parts_of_a_latency_add_up_for_forks_and_for_who_was_swapped_out(preemption: str) -> None:
    config = config_of(4, 16, max_num_seqs=5, num_cpu_blocks=20, preemption=preemption)
    followed = Followed(config)
    rng = random.Random(7)
    preempted = 0
    for _ in range(12):
        prompt = [rng.randrange(300) for _ in range(rng.randint(5, 20))]
        followed.engine.add_request(prompt, SamplingParams(max_tokens=rng.randint(4, 20), n=rng.choice((1, 1, 3))))
        for _ in range(rng.randint(1, 8)):
            followed.step()
            for request in followed.state.requests.values():
                latency = latency_of(request, end_of(followed.state))
                assert sum(latency.parts) == latency.total_ns
                assert min(latency.parts) >= 0
    followed.run()
    for request in followed.state.requests.values():
        latency = latency_of(request, end_of(followed.state))
        assert sum(latency.parts) == latency.total_ns
        preempted += request.preemptions
    assert preempted > 0

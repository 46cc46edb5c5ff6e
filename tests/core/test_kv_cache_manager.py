import pytest

from engine.config import CacheConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.request import Request, SamplingParams
from engine.trace.events import Op


def manager(num_blocks: int, block_size: int = 4, *, prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(CacheConfig(block_size=block_size, num_blocks=num_blocks, prefix_caching=prefix_caching))


def request(number: int, tokens: int | list[int], salt: str | None = None) -> Request:
    token_ids = list(range(100, 100 + tokens)) if isinstance(tokens, int) else tokens
    return Request(number, "", token_ids, SamplingParams(cache_salt=salt))


def admit(kv: KVCacheManager, req: Request) -> list[int] | None:
    """Admit a request as the scheduler does; its block table, or None where it does not fit."""
    hits = kv.get_computed_blocks(req)
    if not kv.allocate_slots(req, req.num_tokens, hits):
        return None
    req.num_computed_tokens = hits.num_tokens
    return list(kv.block_table(req.request_id))


def compute(kv: KVCacheManager, req: Request, upto: int | None = None) -> None:
    before = req.num_computed_tokens
    req.num_computed_tokens = req.num_tokens if upto is None else upto
    kv.publish(req, before, kv.block_table(req.request_id))


def state(kv: KVCacheManager) -> object:
    pool = kv.pool
    blocks = [(block.ref_cnt, block.block_hash) for block in pool.blocks]
    return blocks, [block.block_id for block in pool.free_queue], pool.num_free, pool.num_cached


def test_blocks_go_first_in_first_out_without_prefix_caching():
    kv = manager(16, 4, prefix_caching=False)
    a, b, c, d = request(0, 5), request(1, 12), request(2, 3), request(3, 6)
    assert [admit(kv, r) for r in (a, b, c)] == [[0, 1], [2, 3, 4], [5]]
    assert kv.pool.num_free == 10
    assert (kv.free(0), kv.free(2)) == (2, 1)
    assert kv.pool.num_free == 13
    assert admit(kv, d) == [6, 7]


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 7, 8, 9, 31, 32, 33])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_full_hit_leaves_the_last_token_to_compute(prompt: int, block_size: int):
    kv = manager(80, block_size)
    first, second = request(0, prompt), request(1, prompt)
    table = admit(kv, first)
    assert table is not None
    compute(kv, first)
    hits = kv.get_computed_blocks(second)
    assert hits.blocks == table[: (prompt - 1) // block_size]
    assert hits.num_tokens == len(hits.blocks) * block_size < prompt


def test_a_table_grows_when_a_token_finds_no_slot():
    kv = manager(4)
    req = request(0, 4)
    assert admit(kv, req) == [0]
    for num_tokens, blocks in ((4, [0]), (5, [0, 1]), (8, [0, 1]), (9, [0, 1, 2])):
        assert kv.allocate_slots(req, num_tokens)
        assert kv.block_table(0) == blocks


def test_a_running_request_that_finds_no_block_keeps_what_it_has():
    kv = manager(3)
    a, b = request(0, 8), request(1, 4)
    admit(kv, a)
    admit(kv, b)
    before = state(kv)
    assert not kv.allocate_slots(a, 9)
    assert (state(kv), kv.block_table(0)) == (before, [0, 1])


def test_a_failed_admission_changes_nothing():
    kv = manager(4)
    kv.pool.ops = []
    a = request(0, 9)
    admit(kv, a)
    compute(kv, a)
    kv.free(0)
    other = request(1, [7] * 5)
    assert admit(kv, other) is not None
    kv.pool.take_ops()
    before = state(kv)
    # Two hits wait in the free queue and fill it: the third block that it needs is not there.
    again = request(2, 12)
    hits = kv.get_computed_blocks(again)
    assert len(hits.blocks) == 2
    assert kv.pool.num_free == 2
    assert kv.num_free_needed(12, hits) == 3
    assert not kv.allocate_slots(again, 12, hits)
    assert state(kv) == before
    assert kv.pool.take_ops() == []
    kv.free(1)
    assert admit(kv, again) is not None


def test_a_hit_in_use_takes_no_free_block():
    kv = manager(4)
    a = request(0, 12)
    admit(kv, a)
    compute(kv, a)
    b = request(1, 12)
    hits = kv.get_computed_blocks(b)
    assert (len(hits.blocks), kv.num_free_needed(12, hits), kv.pool.num_free) == (2, 1, 1)
    assert admit(kv, b) == [0, 1, 3]


def test_content_is_found_only_after_it_was_computed():
    kv = manager(8)
    a, b = request(0, 9), request(1, 9)
    admit(kv, a)
    assert kv.get_computed_blocks(b).num_tokens == 0
    compute(kv, a, upto=7)
    assert kv.get_computed_blocks(b).blocks == [0]
    compute(kv, a)
    assert kv.get_computed_blocks(b).blocks == [0, 1]


def test_two_equal_prompts_in_one_step_do_not_share_what_is_not_written():
    kv = manager(8)
    a, b = request(0, 8), request(1, 8)
    assert (admit(kv, a), admit(kv, b)) == ([0, 1], [2, 3])
    compute(kv, a)
    compute(kv, b)
    assert kv.get_computed_blocks(request(2, 9)).blocks == [0, 1]


def test_generated_tokens_are_found_too():
    kv = manager(8)
    a = request(0, 6)
    admit(kv, a)
    compute(kv, a)
    a.output_token_ids += [1, 2, 3]
    assert kv.allocate_slots(a, 9)
    compute(kv, a, upto=8)
    kv.forget(0)
    assert kv.get_computed_blocks(request(1, [*range(100, 106), 1, 2, 9])).blocks == [0, 1]
    assert kv.get_computed_blocks(request(2, [*range(100, 106), 1, 9, 9])).blocks == [0]


@pytest.mark.parametrize(("salt", "found"), [("x", 2), ("y", 0), (None, 0), ("", 0)])
def test_prefixes_are_shared_within_a_salt_only(salt: str | None, found: int):
    kv = manager(8)
    a = request(0, 9, salt="x")
    admit(kv, a)
    compute(kv, a)
    assert len(kv.get_computed_blocks(request(1, 9, salt=salt)).blocks) == found


def test_a_prefix_loses_its_tail_first():
    kv = manager(4)
    a = request(0, 16)
    admit(kv, a)
    compute(kv, a)
    kv.forget(0)
    for number, hits_left in ((1, 3), (2, 2), (3, 1)):
        admit(kv, request(number, [number]))
        assert len(kv.get_computed_blocks(request(9, 17)).blocks) == hits_left


def test_without_prefix_caching_nothing_is_found_and_nothing_stays():
    kv = manager(8, prefix_caching=False)
    a = request(0, 9)
    admit(kv, a)
    compute(kv, a)
    assert kv.get_computed_blocks(request(1, 9)).num_tokens == 0
    kv.forget(0)
    assert (kv.pool.num_cached, kv.pool.num_free) == (0, 8)


def test_freeing_twice_is_freeing_once():
    kv = manager(4)
    admit(kv, request(0, 9))
    assert kv.free(0) == 3
    before = state(kv)
    assert (kv.free(0), kv.free(77)) == (0, 0)
    kv.forget(0)
    assert state(kv) == before


def test_a_preempted_request_finds_its_own_blocks_again():
    kv = manager(8)
    a = request(0, 10)
    admit(kv, a)
    compute(kv, a)
    kv.free(0)
    a.num_computed_tokens = 0
    assert admit(kv, a) == [0, 1, 3]


def test_the_trace_tells_what_each_chunk_filled_and_published():
    kv = manager(8)
    kv.pool.ops = []
    a = request(0, 11)
    admit(kv, a)
    kv.pool.take_ops()
    rows = []
    for upto in (3, 4, 9, 11):
        compute(kv, a, upto=upto)
        rows.append([row[:2] + ((row.c,) if row.op == Op.FILL else ()) for row in kv.pool.take_ops()])
    assert rows == [
        [(Op.FILL, 0, 3)],
        [(Op.FILL, 0, 4), (Op.HASH, 0)],
        [(Op.FILL, 1, 4), (Op.FILL, 2, 1), (Op.HASH, 1)],
        [(Op.FILL, 2, 3)],
    ]

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.block_hash import trace_key
from engine.core.block_pool import BlockPool, BlockPoolError
from engine.trace.events import Op

DIGESTS = [bytes([i]) * 32 for i in range(1, 9)]


def order(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_queue]


def snapshot(pool: BlockPool) -> object:
    backwards = []
    block = pool.free_queue.head.prev_free
    while block is not pool.free_queue.head:
        backwards.append(block.block_id)
        block = block.prev_free
    assert backwards[::-1] == order(pool), "the queue reads differently backwards"
    blocks = [(block.ref_cnt, block.block_hash) for block in pool.blocks]
    return blocks, order(pool), pool.num_free, pool.num_used, pool.num_cached, list(pool.ops or ())


def test_blocks_come_in_order_of_their_ids_and_then_of_their_release():
    pool = BlockPool(6)
    assert pool.allocate(4, request_id=1) == [0, 1, 2, 3]
    pool.release([2, 0], 1)
    assert pool.allocate(4, request_id=2) == [4, 5, 2, 0]
    assert (pool.num_free, pool.num_used) == (0, 6)


def test_too_large_an_allocation_takes_nothing():
    pool = BlockPool(3)
    pool.ops = []
    pool.allocate(2, 1)
    before = snapshot(pool)
    with pytest.raises(BlockPoolError, match="request 7 asked for 2 blocks and 1 are free"):
        pool.allocate(2, 7)
    assert snapshot(pool) == before


def test_a_pool_can_be_drained_and_filled_again_and_again():
    pool = BlockPool(5)
    for _ in range(3):
        taken = pool.allocate(5, 1)
        assert (order(pool), pool.num_free) == ([], 0)
        pool.release(taken[::-1], 1)
        assert order(pool) == taken[::-1]


@pytest.mark.parametrize("position", ["head", "middle", "tail"])
def test_a_hit_leaves_the_free_queue_from_anywhere(position: str):
    pool = BlockPool(5)
    block = {"head": 0, "middle": 2, "tail": 4}[position]
    pool.touch([block], 1)
    assert order(pool) == [i for i in range(5) if i != block]
    assert pool.num_free == 4
    snapshot(pool)


def test_a_block_with_two_references_is_freed_by_the_second_release():
    pool = BlockPool(4)
    pool.allocate(2, 1)
    pool.touch([0], 2)
    pool.release([1, 0], 1)
    assert order(pool) == [2, 3, 1]
    pool.release([0], 2)
    assert order(pool) == [2, 3, 1, 0]


@pytest.mark.parametrize(
    ("released", "message"),
    [
        ([0, 1, 0], "block 0, which is free"),
        ([2, 0, 2], "block 2, .*twice"),
        ([2, 2], "block 2, .*twice"),
        ([0, 3, 2], "block 3, which is free"),
        ([2, 0, 5], "block 5, which does not exist"),
        ([0, 1, -1], "block -1, which does not exist"),
        ([0, 1, -3], "block -3, which does not exist"),
    ],
)
def test_a_wrong_release_is_refused_and_changes_nothing(released: list[int], message: str):
    pool = BlockPool(5)
    pool.ops = []
    pool.allocate(3, 1)
    pool.publish(1, DIGESTS[0])
    pool.touch([2], 2)
    before = snapshot(pool)
    with pytest.raises(BlockPoolError, match=message):
        pool.release(released, 1)
    assert snapshot(pool) == before
    pool.release([2, 1, 0], 1)
    assert order(pool) == [3, 4, 1, 0]


def test_releasing_nothing_is_nothing():
    pool = BlockPool(2)
    before = snapshot(pool)
    pool.release([], 1)
    assert snapshot(pool) == before


def test_content_is_found_until_its_block_is_allocated_again():
    pool = BlockPool(3)
    pool.allocate(2, 1)
    pool.publish(0, DIGESTS[0])
    pool.release([1, 0], 1)
    assert (pool.find(DIGESTS[0]), pool.num_cached, pool.num_free) == (0, 1, 3)
    assert pool.allocate(2, 2) == [2, 1]
    assert pool.find(DIGESTS[0]) == 0
    assert pool.allocate(1, 2) == [0]
    assert (pool.find(DIGESTS[0]), pool.num_cached) == (None, 0)


def test_the_second_block_of_a_content_stands_by_until_the_first_is_evicted():
    pool = BlockPool(3)
    pool.allocate(3, 1)
    for block in (0, 1, 2):
        pool.publish(block, DIGESTS[0])
    pool.release([0, 1, 2], 1)
    assert (pool.find(DIGESTS[0]), pool.num_cached) == (0, 3)
    pool.touch([0], 2)
    assert pool.allocate(1, 2) == [1]
    assert (pool.find(DIGESTS[0]), pool.num_cached) == (0, 1)
    pool.release([0], 2)
    assert pool.allocate(1, 3) == [2]
    assert pool.find(DIGESTS[0]) == 0
    assert pool.allocate(1, 3) == [0]
    assert (pool.find(DIGESTS[0]), pool.num_cached) == (None, 0)


def test_the_next_in_line_is_found_once_the_first_is_evicted():
    pool = BlockPool(2)
    pool.allocate(2, 1)
    pool.publish(0, DIGESTS[0])
    pool.publish(1, DIGESTS[0])
    pool.release([0], 1)
    pool.allocate(1, 2)
    assert pool.find(DIGESTS[0]) == 1


@pytest.mark.parametrize("case", ["free", "published"])
def test_what_cannot_hold_content_is_not_published(case: str):
    pool = BlockPool(2)
    pool.allocate(1, 1)
    pool.publish(0, DIGESTS[0])
    before = snapshot(pool)
    with pytest.raises(BlockPoolError, match="cannot be published"):
        pool.publish(1 if case == "free" else 0, DIGESTS[1])
    assert snapshot(pool) == before


def test_every_operation_is_written_in_order_while_somebody_looks():
    pool = BlockPool(2)
    pool.ops = []
    pool.allocate(2, 7)
    pool.publish(1, DIGESTS[0])
    pool.touch([1], 8, first_logical=3)
    pool.release([1, 0], 7)
    pool.release([1], 8)
    pool.allocate(2, 9, first_logical=5)
    key = trace_key(DIGESTS[0])
    assert pool.take_ops() == [
        (Op.ALLOCATE, 0, 7, 0),
        (Op.ALLOCATE, 1, 7, 1),
        (Op.HASH, 1, key, 0),
        (Op.SHARE, 1, 8, 3),
        (Op.RELEASE, 1, 7, 0),
        (Op.RELEASE, 0, 7, 0),
        (Op.RELEASE, 1, 8, 0),
        (Op.EVICT, 1, key, 0),
        (Op.ALLOCATE, 0, 9, 5),
        (Op.ALLOCATE, 1, 9, 6),
    ]
    assert pool.take_ops() == []


def test_a_content_is_told_as_lost_only_when_the_last_block_with_it_goes():
    pool = BlockPool(2)
    lost: list[tuple[int, bytes]] = []
    pool.on_evict = lambda block_id, digest: lost.append((block_id, digest))
    pool.allocate(2, 1)
    pool.publish(0, DIGESTS[0])
    pool.publish(1, DIGESTS[0])
    pool.release([0, 1], 1)
    pool.allocate(1, 2)
    assert (lost, pool.find(DIGESTS[0])) == ([], 1)
    pool.allocate(1, 2)
    assert (lost, pool.find(DIGESTS[0])) == ([(1, DIGESTS[0])], None)


def test_a_row_of_the_trace_names_its_places():
    pool = BlockPool(1)
    pool.ops = []
    pool.allocate(1, 7, first_logical=2)
    (row,) = pool.take_ops()
    assert (row.op, row.a, row.b, row.c) == (Op.ALLOCATE, 0, 7, 2)


def test_nothing_is_written_while_nobody_looks():
    pool = BlockPool(2)
    pool.release(pool.allocate(2, 1), 1)
    assert (pool.ops, pool.take_ops()) == (None, [])


@given(st.data())
def test_the_pool_equals_a_plain_model_of_it(data: st.DataObject):
    """References and the free order against lists, over random allocations, hits and releases."""
    num = data.draw(st.integers(1, 8), label="blocks")
    pool = BlockPool(num)
    queue, refs = list(range(num)), [0] * num
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 12), label="operations")):
        kind = data.draw(st.sampled_from(["allocate", "touch", "release"]))
        if kind == "allocate":
            n = data.draw(st.integers(0, len(queue)))
            taken = pool.allocate(n, 1)
            assert taken == queue[:n]
            del queue[:n]
            held.append(taken)
        elif kind == "touch":
            blocks = data.draw(st.lists(st.integers(0, num - 1), unique=True))
            pool.touch(blocks, 1)
            queue = [block for block in queue if block not in blocks]
            held.append(blocks)
        elif held:
            blocks = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pool.release(blocks, 1)
            queue += [block for block in blocks if refs[block] == 1]
        refs = [sum(block in table for table in held) for block in range(num)]
        assert order(pool) == queue
        assert [block.ref_cnt for block in pool.blocks] == refs
        assert (pool.num_free, pool.num_used) == (len(queue), num - len(queue))
        snapshot(pool)

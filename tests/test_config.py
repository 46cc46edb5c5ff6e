import dataclasses

import pytest

from engine.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig


@pytest.mark.parametrize(
    ("part", "setting", "message"),
    [
        (CacheConfig, {"block_size": 0}, "block size 0 is not possible"),
        (CacheConfig, {"block_size": 4097}, "block size 4097"),
        (CacheConfig, {"num_blocks": 0}, "a pool of 0 blocks is too small: it needs at least 1 block"),
        (CacheConfig, {"num_blocks": -1}, "a pool of -1 blocks"),
        (CacheConfig, {"num_blocks": 2**31}, "too large"),
        (SchedulerConfig, {"max_num_seqs": 0}, "--max-num-seqs 0"),
        (SchedulerConfig, {"max_num_batched_tokens": 0}, "--max-num-batched-tokens 0"),
        (SchedulerConfig, {"max_prefill_chunk": -1}, "--max-prefill-chunk -1"),
        (SchedulerConfig, {"max_model_len": 1}, "--max-model-len 1"),
        (SchedulerConfig, {"policy": "static", "async_scheduling": True}, "use --no-async-scheduling"),
    ],
)
def test_a_setting_that_cannot_work_is_named_in_one_line(part: type, setting: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message) as raised:
        part(**setting)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("part", "setting"),
    [
        (CacheConfig, {"block_size": 1, "num_blocks": 1}),
        (CacheConfig, {"block_size": 4096}),
        (SchedulerConfig, {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_prefill_chunk": 0, "max_model_len": 2}),
    ],
)
def test_the_smallest_settings_that_work_are_taken(part: type, setting: dict[str, int]):
    made = part(**setting)
    assert {name: getattr(made, name) for name in setting} == setting


def test_a_configuration_does_not_change_once_it_is_made():
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache.num_blocks = 1  # type: ignore[misc]

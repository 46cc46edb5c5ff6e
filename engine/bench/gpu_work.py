"""What the parts of the GPU bench do, each in a process of its own (`engine.bench.gpu_parts`)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from engine.attention.triton import paged_attention
from engine.attention.triton_tiles import Tile
from engine.bench.gpu_checks import check_configuration, check_graph, check_independence
from engine.bench.gpu_report import Fact, LeftOut, one_line
from engine.bench.gpu_timing import LLAMA_8B, SMOLLM2, Bench, graph_timer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from engine.bench.ahead_of_time import Configuration
    from engine.bench.gpu_report import Report, Row


def configuration(report: Report, *, device: torch.device, what: Configuration) -> None:
    """One configuration of the kernels against the reference."""
    report.check(check_configuration(what, device))


def batches(report: Report, *, device: torch.device) -> None:
    """A captured decode for another batch, and a decode among others."""
    report.check(check(device, paged_attention) for check in (check_graph, check_independence))


def tokens(report: Report) -> None:
    """The engine's tokens with the kernels, with the reference, and with steps that overlap."""
    from engine.bench.gpu_model import same_overlapped, same_tokens

    report.check(check() for check in (same_tokens, same_overlapped))


def speed_of(report: Report, *, shape: str, requests: Sequence[int]) -> None:
    """Tokens per second of a whole model, in each way to run it."""
    from engine.bench.gpu_model import speed, transformers_speed

    rows: list[Callable[[], Row | Iterable[Row]]] = [
        partial(speed, shape, requests),
        partial(speed, shape, requests[1:], async_scheduling=True),
        partial(speed, shape, (32,), cuda_graphs=False),
        partial(transformers_speed, shape, 32),
    ]
    report.section("Whole models, random weights, bfloat16", rows)


def kernels(report: Report, *, device: torch.device) -> None:
    """The time of each kernel, beside torch's attention and a plain copy."""
    bench = Bench(device, graph_timer)
    try:
        report.take(Fact("copy bandwidth, GB/s", round(bench.copy_bandwidth() / 1e9)))
    except Exception as error:  # as a row that fails: the others do not need it
        report.take(LeftOut(f"copy bandwidth: {one_line(error)}"))
    decodes = [
        (LLAMA_8B, 1, 2048),
        (LLAMA_8B, 1, 16384),
        (LLAMA_8B, 8, 2048),
        (LLAMA_8B, 32, 512),
        (LLAMA_8B, 32, 2048),
        (LLAMA_8B, 128, 2048),
        (SMOLLM2, 32, 512),
        (SMOLLM2, 128, 2048),
    ]
    report.section("Decode, one layer", [partial(bench.decode, *case) for case in decodes])
    report.section(
        "What paging costs: 32 decodes of 512 tokens",
        [partial(bench.paging, LLAMA_8B, 32, 512, [8, 16, 32, 64, 128])],
    )
    report.section("Quantised cache: 32 decodes of 2048 tokens", [partial(bench.quantised, LLAMA_8B, 32, 2048)])
    prefills = [(1, 512, 512), (1, 2048, 2048), (4, 2048, 2048), (1, 8192, 8192), (1, 512, 8192), (1, 32, 16384)]
    report.section("Prefill, one layer", [partial(bench.prefill, LLAMA_8B, *case) for case in prefills])
    report.section("Cache write, one layer", [partial(bench.write, LLAMA_8B, rows) for rows in (32, 512, 8192)])


def tune(report: Report, *, device: torch.device) -> None:
    """Other cuts of the same work."""
    bench = Bench(device, graph_timer)
    report.section("Other cuts", [partial(bench.tune, LLAMA_8B, *choice) for choice in _choices()])


def _choices() -> list[tuple[list[tuple[int, int]], list[Any]]]:
    decodes = [Tile(16, n, w, s) for n in (32, 64, 128) for w in (2, 4, 8) for s in (2, 3, 4)]
    prefills = [Tile(m, n, w, s) for m in (64, 128) for n in (32, 64, 128) for w in (4, 8) for s in (2, 3)]
    return [([(1, 2048)] * 32, decodes), ([(2048, 2048)], prefills)]

"""One side of the throughput comparison, in a process of its own: `python -m engine.bench.contenders SIDE FILE ...`.

It loads its model, says so, and then runs the whole workload once for each line that it reads; each time it writes a
line of JSON with tokens, elapsed seconds and CPU seconds. What the peers' packages print goes to standard error.

A workload file is `[{"ids": prompt token ids, "out": tokens to generate, past any end of sequence}]`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Work = list[dict[str, Any]]
Run = Callable[[], dict[str, float]]
"""Runs the workload once; `tokens` that were asked for and delivered, and whatever else is of interest."""


def ours(policy: str, work: Work, options: argparse.Namespace) -> Run:
    """The engine itself, with one of its policies, or `int8` for the paged one with 8-bit weights.

    With `--asked N` every request asks for N tokens and is ended from outside after its own number, as an end of
    sequence would: only then is what it may generate more than what it does.
    """
    from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
    from engine.request import SamplingParams
    from engine.trace.events import StepTrace

    longest = max(len(r["ids"]) + max(r["out"], options.asked) for r in work)
    chosen: Any = "paged" if policy == "int8" else policy
    config = EngineConfig(
        model=ModelConfig(options.model, dtype=options.dtype, weights="int8" if policy == "int8" else "auto"),
        cache=CacheConfig(num_blocks=options.num_blocks, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=32, max_model_len=longest + 1, policy=chosen),
    )
    if options.model == "simulated":
        from engine.simulated import simulated_engine

        engine = simulated_engine(config)
    else:
        from engine.model import load_engine

        engine = load_engine(config)
    batches: list[int] = []
    engine.add_sink(lambda message: batches.append(len(message.batch)) if isinstance(message, StepTrace) else None)

    def run() -> dict[str, float]:
        batches.clear()
        used: list[int] = []
        counts: dict[int, int] = {}
        wanted = {}
        for r in work:
            params = SamplingParams(max_tokens=max(r["out"], options.asked), ignore_eos=True)
            wanted[engine.add_request([token % options.vocabulary for token in r["ids"]], params)] = r["out"]
        while engine.has_work:
            for output in engine.step():
                request_id = output.request_id
                counts[request_id] = counts.get(request_id, 0) + len(output.token_ids)
                if output.finish_reason is None and counts[request_id] >= wanted[request_id]:
                    engine.abort(request_id)
            used.append(engine.scheduler.kv.pool.num_used)
        tokens = sum(min(counts.get(n, 0), out) for n, out in wanted.items())
        filled = [batch for batch in batches if batch]
        return {
            "tokens": tokens,
            "steps": len(filled),
            "batch": sum(filled) / len(filled),
            "preemptions": engine.scheduler.num_preemptions,
        }

    return run


def _transformers(options: argparse.Namespace) -> Any:
    import torch

    from engine.model.checkpoint import find_checkpoint
    from engine.model.device import choose_dtype, set_threads
    from engine.model.pretrained import load_transformers

    set_threads()
    device = torch.device("cpu")
    return load_transformers(find_checkpoint(options.model), device, choose_dtype(options.dtype, device))[0]


def transformers_static(work: Work, options: argparse.Namespace) -> Run:
    """`generate` on all requests as one padded batch; only tokens that each asked for count."""
    import torch

    model = _transformers(options)
    width, longest = max(len(r["ids"]) for r in work), max(r["out"] for r in work)
    ids = torch.tensor([[2] * (width - len(r["ids"])) + r["ids"] for r in work])
    mask = torch.tensor([[0] * (width - len(r["ids"])) + [1] * len(r["ids"]) for r in work])

    def run() -> dict[str, float]:
        model.generate(
            ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=2
        )
        return {"tokens": sum(r["out"] for r in work)}

    return run


def transformers_continuous(work: Work, options: argparse.Namespace) -> Run:
    """The continuous batching that transformers has."""
    from transformers import GenerationConfig

    model = _transformers(options)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max(r["out"] for r in work),
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=2,
        num_blocks=512,
        max_batch_tokens=2048,
    )

    def run() -> dict[str, float]:
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()
        try:
            for number, r in enumerate(work):
                manager.add_request(r["ids"], request_id=f"r{number}", max_new_tokens=r["out"])
            done = tokens = 0
            while done < len(work):
                result = manager.get_result(timeout=120)
                if result is None:
                    raise RuntimeError(f"no result came for 120 s, with {done} of {len(work)} requests done")
                if result.is_finished():
                    done += 1
                    tokens += len(result.generated_tokens)
        finally:
            manager.stop(block=True)
        return {"tokens": tokens}

    return run


def vllm(work: Work, options: argparse.Namespace) -> Run:
    """The CPU build of vLLM, offline."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    model = LLM(options.folder, dtype=options.peer_dtype, max_model_len=1024, enforce_eager=True, max_num_seqs=32)
    params = [SamplingParams(temperature=0, max_tokens=r["out"], ignore_eos=True) for r in work]
    prompts = [{"prompt_token_ids": r["ids"]} for r in work]

    def run() -> dict[str, float]:
        model.reset_prefix_cache()
        outputs = model.generate(prompts, params, use_tqdm=False)
        return {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    return run


def openvino(work: Work, options: argparse.Namespace) -> Run:
    """OpenVINO GenAI's continuous batching over the quantised GGUF file."""
    import numpy as np
    import openvino as ov  # type: ignore[import-not-found,unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found,unused-ignore]

    limits = genai.SchedulerConfig()
    limits.cache_size, limits.max_num_seqs, limits.max_num_batched_tokens = 1, 32, 2048
    limits.dynamic_split_fuse, limits.enable_prefix_caching = True, False
    pipeline = genai.ContinuousBatchingPipeline(options.gguf, limits, "CPU")
    prompts = [ov.Tensor(np.array([r["ids"]], dtype=np.int64)) for r in work]
    settings = []
    for r in work:
        setting = genai.GenerationConfig()
        setting.max_new_tokens = setting.min_new_tokens = r["out"]
        setting.ignore_eos, setting.do_sample = True, False
        settings.append(setting)

    def run() -> dict[str, float]:
        outputs = pipeline.generate(prompts, settings)
        return {"tokens": sum(len(output.m_generation_ids[0]) for output in outputs)}

    return run


def _side(name: str, work: Work, options: argparse.Namespace) -> Run:
    if name.startswith("ours-"):
        return ours(name.removeprefix("ours-"), work, options)
    sides: dict[str, Callable[[Work, argparse.Namespace], Run]] = {
        "transformers-static": transformers_static,
        "transformers-continuous": transformers_continuous,
        "vllm": vllm,
        "openvino": openvino,
    }
    return sides[name](work, options)


def main() -> None:
    """Load, then run as often as asked."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.contenders")
    parser.add_argument("side")
    parser.add_argument("workload", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peer-dtype", default="float32")
    parser.add_argument("--folder", default="")
    parser.add_argument("--gguf", default="")
    parser.add_argument("--num-blocks", type=int, default=512)
    parser.add_argument("--asked", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=1 << 31)
    options = parser.parse_args()
    # Whatever the packages print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = _side(options.side, json.loads(options.workload.read_text()), options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        result = run()
        result |= {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()

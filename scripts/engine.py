"""Serve a draft with vLLM on the CPU, one prompt at a time. Greedy decoding only.

Run by the serving environment's Python (see scripts/serving-env), so it imports nothing of the
project; benches/engine.py talks to it. It reads JSON lines {"ids": […], "limit": n} and answers
each with a line that begins with @: the new ids, the seconds of the whole call, and what was
drafted and accepted in it. An empty answer, @{}, says that it is ready.

At T > 0 the engine's CPU kernels read uninitialised memory (vLLM issue 55005), so sampled decoding
is not offered.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a draft with vLLM, prompts from stdin.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--method", help="vLLM's name for the way to draft (default: no drafts)")
    parser.add_argument("--parallel", action="store_true", help="draft all depths at once")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compiled", action="store_true", help="use torch.compile")
    args = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    speculative: dict[str, str | int] | None = None
    if args.method:
        speculative = {"method": args.method, "num_speculative_tokens": args.gamma}
        if args.parallel:
            speculative["parallel_drafting"] = True
        if args.draft:
            speculative["model"] = args.draft
    overrides = Path(args.draft or "") / "target-overrides.json"
    engine = LLM(
        args.target,
        hf_overrides=json.loads(overrides.read_text()) if overrides.is_file() else {},
        dtype=args.dtype,
        enforce_eager=not args.compiled,
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=1,  # in bfloat16 the composition of a batch flips near-ties
        disable_log_stats=False,
        speculative_config=speculative,
    )
    say({})
    for line in sys.stdin:
        asked = json.loads(line)
        before = counts(engine)
        params = SamplingParams(temperature=0.0, max_tokens=asked["limit"])
        started = time.perf_counter()
        out = engine.generate(TokensPrompt(prompt_token_ids=asked["ids"]), params, use_tqdm=False)
        seconds, drafted = time.perf_counter() - started, {}
        for name, values in counts(engine).items():
            drafted[name] = [n - b for n, b in zip(values, before[name], strict=True)]
        say({"seconds": seconds, "ids": list(out[0].outputs[0].token_ids), **drafted})


def say(answer: Mapping[str, object]) -> None:
    print("@" + json.dumps(answer), flush=True)


def counts(engine: Any) -> dict[str, list[int]]:
    """The engine's speculative counters, each as a list."""
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            values = getattr(metric, "values", None)
            name = metric.name.removeprefix("vllm:spec_decode_")
            found[name] = [int(x) for x in ([metric.value] if values is None else values)]
    return found


if __name__ == "__main__":
    main()

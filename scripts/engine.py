"""Serve a draft with vLLM on the CPU and count what it accepts. Greedy decoding only.

Run by the serving environment's Python (see scripts/serving-env), so it imports nothing of the
project:

    .venv-serving/bin/python scripts/engine.py --target DIR --draft DIR --method eagle3 \
        --gamma 3 --prompts ids.json --max-new-tokens 64 --dtype float32 --out counts.json

`ids.json` is a list of lists of token ids. With `--ours`, our decoder's answers to them, our texts
are also served in pieces: in bfloat16 near-ties flip, so wherever the engine leaves our text it is
put back on it, and counts compare over text that both write. At T > 0 the engine's CPU kernels
read uninitialised memory (vLLM issue 55005), so sampled decoding is not offered.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a draft with vLLM and count acceptance.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--method", required=True, help="eagle3, medusa, draft_model, ngram, none")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--compiled", action="store_true", help="through torch.compile")
    parser.add_argument("--ours", type=Path, help="JSON: a list of token ids for each prompt")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    speculative: dict[str, Any] | None = None
    if args.method != "none":
        speculative = {"method": args.method, "num_speculative_tokens": args.gamma}
        if args.draft:
            speculative["model"] = args.draft
        if args.method == "ngram":
            speculative |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine = LLM(
        args.target,
        dtype=args.dtype,
        enforce_eager=not args.compiled,
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=1,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    prompts = json.loads(args.prompts.read_text())

    def served(prompts: list[list[int]], limits: list[int]) -> dict[str, Any]:
        """Answers of at most so many tokens, one at a time: in bfloat16 the composition of a
        batch flips near-ties."""
        before, started, ids = _counts(engine), time.perf_counter(), []
        for prompt, limit in zip(prompts, limits, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=limit)
            out = engine.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
            ids.append(list(out[0].outputs[0].token_ids))
        seconds = time.perf_counter() - started
        counts = {
            name: [n - b for n, b in zip(values, before[name], strict=True)]
            for name, values in _counts(engine).items()
        }
        return {
            "ids": ids,
            "drafts": sum(counts.get("num_drafts", [])),
            "accepted": sum(counts.get("num_accepted_tokens", [])),
            "accepted_per_pos": counts.get("num_accepted_tokens_per_pos", []),
            "tokens_per_second": sum(map(len, ids)) / seconds,
        }

    def pieces(prompt: list[int], text: list[int]) -> list[dict[str, Any]]:
        """The stretches of our `text` that the engine writes too, each with its counts. A stretch
        ends γ tokens early: the last round's draft is then of tokens that both write."""
        found, start = [], 0
        while start < len(text):
            before = prompt + text[:start]
            alike = _alike(served([before], [len(text) - start])["ids"][0], text[start:])
            if alike > args.gamma + 1:
                found.append(served([before], [alike - args.gamma]) | {"start": start})
            start += alike + 1
        return found

    warm_up = [prompts[0], max(prompts, key=len)]  # as on our side
    served(warm_up, [args.max_new_tokens] * len(warm_up))
    result = served(prompts, [args.max_new_tokens] * len(prompts))
    if args.ours:
        ours = json.loads(args.ours.read_text())
        result["pieces"] = [pieces(*pair) for pair in zip(prompts, ours, strict=True)]
    args.out.write_text(json.dumps(result))


def _alike(one: list[int], two: list[int]) -> int:
    """How many tokens two answers begin with in common."""
    same = [a == b for a, b in zip(one, two, strict=False)]
    return same.index(False) if False in same else len(same)


def _counts(engine: Any) -> dict[str, list[int]]:
    """The engine's speculative counters, each as a list."""
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            values = getattr(metric, "values", None)
            name = metric.name.removeprefix("vllm:spec_decode_")
            found[name] = [metric.value] if values is None else list(values)
    return found


if __name__ == "__main__":
    main()

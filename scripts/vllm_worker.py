"""Serve drafts with vLLM on the CPU, one prompt at a time, by greedy decoding only.

The Python of the serving environment runs this script (see scripts/serving-env), so it imports
nothing from the project. benches/engine.py sends it lines of JSON. The first, {"target": …, …},
starts an engine, which answers @{} when it is ready. To each {"ids": […], "limit": n} it answers
with a line that begins with @ and gives the new ids, the seconds of the whole call, and vLLM's
counts of what was drafted and accepted. An empty line ends the engine. This too is answered with
@{}, and then another engine can be started. Each engine is a fork of this process, so vLLM is
imported only once.

At T > 0 the engine's CPU kernels read uninitialised memory (vLLM issue 55005), so sampled decoding
is not offered.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.model_executor.models import registry


def main() -> None:
    # by default vLLM inspects each kind of model in a new process, which imports vLLM again
    registry._run_in_subprocess = lambda asked: asked()
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            serve(**json.loads(line))
            os._exit(0)
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(abs(status))
        say({})


def serve(
    target: str,
    draft: str | None,
    method: str | None,
    parallel: bool,
    gamma: int,
    dtype: str,
    compiled: bool,
) -> None:
    """Answer prompts until an empty line. `method` is vLLM's name for the way to draft (None: no
    drafts), `parallel` drafts all depths at once, and `compiled` uses torch.compile."""
    speculative: dict[str, str | int] | None = None
    if method:
        speculative = {"method": method, "num_speculative_tokens": gamma}
        if parallel:
            speculative["parallel_drafting"] = True
        if draft:
            speculative["model"] = draft
    overrides = Path(draft) / "target-overrides.json" if draft else None
    engine = LLM(
        target,
        hf_overrides=json.loads(overrides.read_text(encoding="utf-8"))
        if overrides and overrides.is_file()
        else {},
        dtype=dtype,
        enforce_eager=not compiled,
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=1,  # in bfloat16 the composition of a batch flips near-ties
        disable_log_stats=False,
        speculative_config=speculative,
    )
    say({})
    while line := sys.stdin.readline().strip():
        asked = json.loads(line)
        before = counts(engine)
        params = SamplingParams(temperature=0.0, max_tokens=asked["limit"])
        started = time.perf_counter()
        out = engine.generate(TokensPrompt(prompt_token_ids=asked["ids"]), params, use_tqdm=False)
        seconds, drafted = time.perf_counter() - started, {}
        for name, values in counts(engine).items():
            drafted[name] = [n - b for n, b in zip(values, before[name], strict=True)]
        say({"seconds": seconds, "ids": list(out[0].outputs[0].token_ids), **drafted})


def say(response: Mapping[str, object]) -> None:
    print("@" + json.dumps(response), flush=True)


def counts(engine: Any) -> dict[str, list[int]]:
    """The engine's counters of speculative decoding, each as a list."""
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            values = getattr(metric, "values", None)
            name = metric.name.removeprefix("vllm:spec_decode_")
            found[name] = [int(x) for x in ([metric.value] if values is None else values)]
    return found


if __name__ == "__main__":
    main()

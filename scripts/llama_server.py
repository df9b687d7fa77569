"""llama.cpp's server from the package `xllamacpp`, with options of `llama-server`.

Runs in the environment of scripts/llama-cpp-env, so it imports nothing of Draftsmith.
scripts/serve --engine llama.cpp starts it; `llama-server` itself takes the same options.
"""

import argparse
import json
import os
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import xllamacpp as xlc

KV_TYPES = {"f32": "GGML_TYPE_F32", "f16": "GGML_TYPE_F16", "q8_0": "GGML_TYPE_Q8_0"}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    option = parser.add_argument
    option("--model", required=True)
    option("--alias", action="append", default=[])
    option("--host", default="127.0.0.1")
    option("--port", type=int, default=8080)
    option("--api-key", action="append", default=[])
    option("--ctx-size", type=int, default=4096, help="tokens of all --parallel responses together")
    option("--parallel", type=int, default=1, help="responses at once")
    option("--batch-size", type=int, default=2048)
    option("--ubatch-size", type=int, default=512)
    option("--cache-ram", type=int, default=0, help="MiB of prompts to keep")
    option("--cache-type-k", choices=KV_TYPES, default="f16")
    option("--cache-type-v", choices=KV_TYPES, default="f16")
    option("--metrics", action="store_true")
    option("--slots", action="store_true")
    option("--chat-template-file", type=Path)
    option("--chat-template-kwargs", metavar="JSON")
    for name in ("--threads", "--threads-batch", "--threads-draft", "--threads-batch-draft"):
        option(name, type=int, default=CORES)
    option("--model-draft")
    option("--spec-type", help="the method of the draft, with dashes, as llama-server names it")
    option("--spec-draft-n-max", type=int, default=3)
    option("--spec-draft-n-min", type=int, default=0)
    option("--spec-draft-p-min", type=float, default=0.0)
    option("--cache-type-k-draft", choices=KV_TYPES, default="f16")
    option("--cache-type-v-draft", choices=KV_TYPES, default="f16")
    return parser.parse_args()


def parameters(args: argparse.Namespace) -> xlc.CommonParams:
    """What `llama-server` would make of the options."""
    params = xlc.CommonParams()
    params.model.path = args.model
    params.model_alias, params.model_tags = args.alias, [f"xllamacpp {version('xllamacpp')}"]
    params.hostnames, params.port, params.api_keys = [args.host], args.port, args.api_key
    params.n_ctx, params.n_parallel = args.ctx_size, args.parallel
    params.n_batch, params.n_ubatch = args.batch_size, args.ubatch_size
    params.cache_ram_mib, params.fit_params = args.cache_ram, False  # the sizes are given
    params.cache_type_k, params.cache_type_v = _kv(args.cache_type_k), _kv(args.cache_type_v)
    params.endpoint_metrics, params.endpoint_slots = args.metrics, args.slots
    if args.chat_template_file is not None:
        params.chat_template = args.chat_template_file.read_text(encoding="utf-8")
    if args.chat_template_kwargs is not None:
        values = json.loads(args.chat_template_kwargs)
        params.default_template_kwargs = {key: json.dumps(value) for key, value in values.items()}
    draft = params.speculative.draft
    # all four: those that are left open are the cores of the whole machine
    params.cpuparams.n_threads, params.cpuparams_batch.n_threads = args.threads, args.threads_batch
    draft.cpuparams.n_threads = args.threads_draft
    draft.cpuparams_batch.n_threads = args.threads_batch_draft
    if args.model_draft is not None:
        name = f"COMMON_SPECULATIVE_TYPE_{args.spec_type.replace('-', '_').upper()}"
        params.speculative.types = [getattr(xlc.common_speculative_type, name)]
        draft.mparams.path = args.model_draft
        draft.n_max, draft.n_min = args.spec_draft_n_max, args.spec_draft_n_min
        draft.p_min = args.spec_draft_p_min
        draft.cache_type_k = _kv(args.cache_type_k_draft)
        draft.cache_type_v = _kv(args.cache_type_v_draft)
    return params


def _kv(name: str) -> xlc.ggml_type:
    return getattr(xlc.ggml_type, KV_TYPES[name])


if __name__ == "__main__":
    server = xlc.Server(parameters(options()))
    print(f"llama.cpp: listening on {server.listening_address}", flush=True)
    if os.environ.get("DRAFTSMITH_ENDS_WITH_STDIN"):  # of the process that started this one
        sys.stdin.read()
    else:
        threading.Event().wait()  # until a signal ends the process

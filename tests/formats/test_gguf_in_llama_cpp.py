"""Exported GGUF files in llama.cpp itself: the target's greedy tokens, and the accepted counts of
random drafts, are those of our decoder. Skipped where scripts/llama-cpp-env has not run.

Run alone: python -m pytest -m serving tests/formats/test_gguf_in_llama_cpp.py
"""

import json
import os
import random
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.drafters.eagle3 import Eagle3Config
from specdec.engines.known_engines import ENGINES
from specdec.engines.local_server import WATCHES
from specdec.formats import draft_export
from specdec.formats.gguf_target import write_target_gguf
from specdec.formats.layout import FileChoices
from specdec.targets.target import Target
from tests.drafters.families import CONFIGS
from tests.formats.test_gguf import SMOLLM, byte_level
from tests.tiny import OF_ENGINES, REPOSITORY, random_drafter, random_target

pytestmark = pytest.mark.serving
# the wheel alone, which needs no other package
environment = ENGINES["llama.cpp"].python(REPOSITORY).parent.parent
sys.path += map(str, environment.glob("lib/python*/site-packages"))
xllamacpp = pytest.importorskip("xllamacpp")

V, NEW = 20, 48  # so few tokens that random drafts are accepted at times
KEPT = torch.tensor([x for x in range(V) if x not in (8, 16, V - 1)])
EAGLE3 = Eagle3Config(depth=3, draft_vocab=len(KEPT), layers=[1, 3, 5])
DRAFTS: dict[str, Any] = {
    "eagle3": EAGLE3,
    "eagle3, normed residual": replace(EAGLE3, norm_before_residual=True),
    "eagle3, normed states": replace(EAGLE3, norm_before_fc=True),
    **{name: replace(CONFIGS[name], draft_vocab=17) for name in ("dflash", "dflash2", "dspark")},
}
KINDS = {"eagle3": "EAGLE3", "dflash": "DFLASH", "dflash2": "DFLASH", "dspark": "DSPARK"}


def target_without_end() -> Target:
    """A target whose likeliest token is never the one that ends a response."""
    target = random_target(LlamaConfig(vocab_size=V, **OF_ENGINES))
    with torch.no_grad():
        target.model.get_input_embeddings().weight[V - 1] = 0
        target.model.get_output_embeddings().weight[V - 1] = 0
    target.tokenizer = byte_level(SMOLLM, V)
    return target


def some_prompts() -> list[list[int]]:
    drawn = random.Random(5)
    return [[drawn.randrange(V - 1) for _ in range(drawn.randrange(4, 60))] for _ in range(12)]


def served(target: Path, draft: Path, kind: str, depth: int) -> list[tuple[list[int], int]]:
    """Greedy responses of llama.cpp in float32, and how many drafted tokens it accepted in each."""
    wanted = xllamacpp.CommonParams()
    wanted.model.path, drafting = str(target), wanted.speculative.draft
    wanted.n_ctx, wanted.n_parallel, wanted.fit_params, wanted.warmup = 512, 1, False, False
    wanted.verbosity = 1
    # flash attention rounds more: a likeliest token by a hair was another one with it
    wanted.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    exact = xllamacpp.ggml_type.GGML_TYPE_F32
    wanted.cache_type_k = wanted.cache_type_v = exact
    drafting.cache_type_k = drafting.cache_type_v = exact
    both = wanted, drafting
    for cpu in [x for part in both for x in (part.cpuparams, part.cpuparams_batch)]:
        cpu.n_threads = 1
    method = getattr(
        xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_DRAFT_{KINDS[kind]}"
    )
    wanted.speculative.types = [method]
    drafting.mparams.path = str(draft)
    drafting.n_max, drafting.n_min, drafting.p_min = depth, 0, 0.0
    server = xllamacpp.Server(wanted)
    responses = []
    for prompt in some_prompts():
        asked = {"prompt": prompt, "n_predict": NEW, "temperature": 0.0, "top_k": 1}
        asked |= {"cache_prompt": False, "return_tokens": True}
        request = urllib.request.Request(
            f"{server.listening_address}/completion",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            response = json.load(answer)
        responses.append((response["tokens"], response["timings"]["draft_n_accepted"]))
    return responses


def exported(folder: Path, name: str, full: bool, stored: str) -> tuple[Any, Any, str]:
    """The target, a random draft of it, and the method's name; `folder` has their files."""
    target, config = target_without_end(), DRAFTS[name]
    if full:
        config = replace(config, draft_vocab=None)
    drafter = random_drafter(config, target, 0.1, None if full else KEPT)
    write_target_gguf(folder / "target.gguf", target, FileChoices("f32"))
    choices = FileChoices(stored)
    draft_export.write_export(folder / "head.gguf", drafter, target, "gguf", choices=choices)
    return target, drafter, config.name


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """As a run does that is killed: its end of the pipe closes."""
    write_target_gguf(tmp_path / "target.gguf", target_without_end(), FileChoices("f32"))
    python, scripts = ENGINES["llama.cpp"].python(REPOSITORY), REPOSITORY / "scripts"
    line = [python, "-m", "llama_server", "--model", tmp_path / "target.gguf", "--port", "0"]
    variables = {**os.environ, "PYTHONPATH": str(scripts), WATCHES: "1"}
    with subprocess.Popen(line, stdin=PIPE, stdout=PIPE, env=variables) as server:
        assert server.stdin is not None and server.stdout is not None
        assert any(b"listening" in said for said in server.stdout)
        assert server.poll() is None
        server.stdin.close()
        try:
            assert server.wait(60) is not None
        finally:
            server.kill()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", DRAFTS)
def test_llama_cpp_accepts_what_our_decoder_accepts(tmp_path: Path, name: str, full: bool) -> None:
    """For each prompt. llama.cpp drafts no further than the end of a response; we do, and such
    tokens are not counted."""
    target, drafter, method = exported(tmp_path, name, full, "f32")
    ours = decode(target, some_prompts(), Way(drafter), max_new_tokens=NEW, eos=())
    accepted = [sum(step.accepted for step in x.steps) - len(x.overrun) for x in ours]
    assert sum(accepted) > 0
    theirs = served(tmp_path / "target.gguf", tmp_path / "head.gguf", method, drafter.depth)
    assert theirs == list(zip([x.ids for x in ours], accepted, strict=True))


@pytest.mark.parametrize("stored", ["f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["eagle3", "dflash", "dflash2", "dspark"])
def test_llama_cpp_drafts_with_rounded_weights(tmp_path: Path, name: str, stored: str) -> None:
    """The target's tokens do not change, whatever is accepted of a rounded draft."""
    target, drafter, method = exported(tmp_path, name, False, stored)
    ours = decode(target, some_prompts(), max_new_tokens=NEW, eos=())
    theirs = served(tmp_path / "target.gguf", tmp_path / "head.gguf", method, drafter.depth)
    assert [ids for ids, _ in theirs] == [x.ids for x in ours]
    assert sum(accepted for _, accepted in theirs) > 0

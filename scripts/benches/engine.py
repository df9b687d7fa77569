"""Compares an exported head in vLLM on the CPU with our decoder, by greedy responses."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

from benches.setting import Timing, setting
from benches.turns import ResponseWriter, TimedGeneration, compare, in_turn, ours, tau

from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.engines.vllm import Vllm
from specdec.errors import UserError, require
from specdec.formats import draft_checkpoint, draft_export
from specdec.measure.choosing import LEARNING, acceptance_by_rank, fastest_shape
from specdec.measure.setup import Setup
from specdec.progress import console
from specdec.sampling.trees import Chain, Static
from specdec.targets.target import Target

HERE = Path(__file__).parent.parent
VENV = Path(os.environ.get("DRAFTSMITH_SERVING_VENV", HERE.parent / ".venv-serving"))


class VllmWorker:
    """vLLM in a separate process (scripts/vllm_worker.py), which answers one prompt at a time after
    `serve`. Its methods raise UserError if vLLM fails."""

    def __init__(self) -> None:
        self.log, pipe = tempfile.TemporaryFile("w+"), subprocess.PIPE  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(VENV / "bin" / "python"), str(HERE / "vllm_worker.py")],
            stdin=pipe,
            stdout=pipe,
            stderr=self.log,
            text=True,
            start_new_session=True,
        )
        self.serving = False

    def __enter__(self) -> "VllmWorker":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and its fork
        self.process.communicate()
        self.log.close()

    def serve(
        self,
        target: Path,
        draft: Path,
        drafter: str | None,
        gamma: int,
        dtype: str,
        compiled: bool = False,
    ) -> None:
        """Serve these folders, in place of those served before. `drafter` is that of the draft;
        None: vanilla decoding."""
        if self.serving:
            self._asked("")
        how: dict[str, Any] = {"draft": None, "method": None, "parallel": False}
        if drafter is not None:
            asked = Vllm().speculative_config(drafter, str(draft), gamma)
            parallel = asked.get("parallel_drafting", False)
            how = {"draft": str(draft), "method": asked["method"], "parallel": parallel}
        how |= {"target": str(target), "gamma": gamma, "dtype": dtype, "compiled": compiled}
        self._asked(json.dumps(how))
        self.serving = True

    def answer(self, prompt: list[int], limit: int) -> TimedGeneration:
        """vLLM's greedy response of at most `limit` tokens."""
        said = self._asked(json.dumps({"ids": prompt, "limit": limit}))
        drafts = sum(said.get("num_drafts", []))  # vanilla decoding has no such counts
        per_position = said.get("num_accepted_tokens_per_pos", [])
        return TimedGeneration(said["ids"], said["seconds"], drafts, per_position)

    def _asked(self, line: str) -> dict[str, Any]:
        """The reply of scripts/vllm_worker.py to a line."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has died, and its log says why
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        self.log.seek(0)
        end = self.log.read().strip()[-400:]
        raise UserError(f"vLLM ended with {self.process.wait()}: {end}")


# By name, the engines that a process keeps imported, so that the next draft starts in seconds
WORKERS = {"vllm": VllmWorker}


@dataclass
class Serving(Timing):
    prompts: int = 40


def engine(draft: Path, timing: Serving) -> None:
    """The same head in vLLM on the CPU and in our decoder.

    Shows τ, accepted counts and tokens/s of both. They take turns on each prompt, decode greedily,
    and are timed with their prefill. If a static tree is expected to be fastest, our decoder is
    timed with it too; vLLM's CPU backend has no trees.
    """
    family = draft_checkpoint.read_card(draft).family
    draft_export.layout_of(family, "hf")
    there = (VENV / "bin" / "python").exists()
    require(there, f"{VENV} holds no serving environment: run scripts/serving-env first")
    at_hand = setting([draft], timing, LEARNING)
    target, drafter, learning = at_hand.target, at_hand.drafter, at_hand.learning
    dtype, gamma = str(target.dtype).removeprefix("torch."), timing.gamma or drafter.depth
    setup, deepest = Setup(target, timing.new), Way(drafter)
    found = acceptance_by_rank(setup, deepest, learning)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        draft_export.write_export(root / "draft", drafter, target)
        target.save(root / "target")
        writers: dict[str, ResponseWriter] = {}
        engines: list[VllmWorker] = []
        for mode, compiled in timing.modes.items():
            mine = partial(ours, target, timing.new)
            plain, chain = Way(compiled=compiled), Way(drafter, Chain(gamma), compiled=compiled)
            for name, served_as, way in (("plain", None, plain), ("speculative", family, chain)):
                engines.append(stack.enter_context(VllmWorker()))
                folders = root / "target", root / "draft"
                engines[-1].serve(*folders, served_as, gamma, dtype, compiled)
                answer = partial(engines[-1].answer, limit=timing.new)
                drafted, theirs = str(gamma) if way.drafter else "", f"vLLM, {name}{mode}"
                writers[theirs] = ResponseWriter(answer, drafted, compiled=compiled)
                writers[f"ours, {name}{mode}"] = mine(way, drafted, [theirs])
            tree = fastest_shape(setup, replace(deepest, compiled=compiled), learning[:1], found)
            if isinstance(tree, Static):
                way = Way(drafter, tree, compiled=compiled)
                writers[f"ours, a tree{mode}"] = mine(way, str(tree.nodes), [theirs])
        made = in_turn(writers, at_hand.prompts)
        compare(writers, made)
        if dtype == "float32":  # then both write the same texts
            return
        texts = [answer.ids for answer in made["ours, speculative"]]
        mine, theirs = list[TimedGeneration](), list[TimedGeneration]()
        for prompt, text in zip(at_hand.prompts, texts, strict=True):
            for pair in on_shared_text(engines[1], target, drafter, gamma, prompt, text):
                mine.append(pair[0])
                theirs.append(pair[1])
    console.print(
        f"over the {sum(len(a.ids) for a in mine)} of {sum(map(len, texts))} tokens that both "
        f"write after the same text, τ is {tau(theirs)} in vLLM and {tau(mine)} here (both eager)"
    )


def on_shared_text(
    vllm: VllmWorker,
    target: Target,
    drafter: Drafter,
    gamma: int,
    prompt: list[int],
    text: list[int],
) -> Iterator[tuple[TimedGeneration, TimedGeneration]]:
    """Our responses and vLLM's along one of our texts, where both write the same tokens.

    In bfloat16 near-ties flip. When vLLM departs from the text, it restarts after the first token
    that differs. A stretch ends γ tokens early, so that its last speculation step drafts only
    tokens that both write.
    """
    start = 0
    while start < len(text):
        before, rest = prompt + text[:start], text[start:]
        same = map(eq, vllm.answer(before, len(rest)).ids, rest)
        alike = sum(1 for _ in takewhile(bool, same))  # tokens before vLLM leaves the text
        if alike > gamma + 1:
            theirs = vllm.answer(before, alike - gamma)
            mine = ours(target, len(theirs.ids), Way(drafter, Chain(gamma))).answer(before)
            if mine.ids == theirs.ids:
                yield mine, theirs
        start += alike + 1

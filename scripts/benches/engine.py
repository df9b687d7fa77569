"""The same exported head in vLLM on the CPU and in our decoder, on the same greedy prompts."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from benches.speed import Variant, ours, ratio
from benches.subject import apart, console, drafts_of, held_out, target_of, tau_of, warm_ups
from rich.table import Table

from specdec.decoding.answers import Generation
from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import generate
from specdec.decoding.static_tree import acceptance_by_rank
from specdec.drafters import Drafter
from specdec.errors import UserError
from specdec.formats import draft as checkpoint
from specdec.formats import export
from specdec.measure.costs import timed
from specdec.measure.job import Job
from specdec.measure.strategy import LEARNING, fastest_shape
from specdec.progress import bars
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Static
from specdec.target.base import Target

HERE = Path(__file__).parent.parent
VENV = Path(os.environ.get("DRAFTSMITH_SERVING_VENV", HERE.parent / ".venv-serving"))


class Served(NamedTuple):
    """An engine's answer: ids, seconds of the call, and what was drafted for it."""

    ids: list[int]
    seconds: float
    drafts: int = 0
    accepted: int = 0
    accepted_per_pos: Sequence[int] = ()


class Engine:
    """vLLM in a process of its own (scripts/engine.py), which answers one prompt at a time.

    `root` holds the folders target and draft; method "none" decodes plainly. Raises UserError
    where the engine fails.
    """

    def __init__(
        self, root: Path, method: str, gamma: int, dtype: str, compiled: bool = False
    ) -> None:
        command = [VENV / "bin" / "python", HERE / "engine.py", "--target", root / "target"]
        command += ["--draft", root / "draft", "--method", method, "--gamma", gamma]
        command += ["--dtype", dtype] + ["--compiled"] * compiled
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=pipe, stdout=pipe, stderr=self.log, text=True
        )
        self._heard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()

    def answer(self, prompt: list[int], limit: int) -> Served:
        """Its greedy answer of at most `limit` tokens."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died: _heard says of what
            self.process.stdin.write(json.dumps({"ids": prompt, "limit": limit}) + "\n")
            self.process.stdin.flush()
        said = self._heard()
        drafts, accepted, per_pos = (  # lists, and missing without a draft
            said.get(f"num_{name}", [])
            for name in ("drafts", "accepted_tokens", "accepted_tokens_per_pos")
        )
        return Served(said["ids"], said["seconds"], sum(drafts), sum(accepted), per_pos)

    def _heard(self) -> dict[str, Any]:
        """The next line that scripts/engine.py says."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        self.log.seek(0)
        end = self.log.read().strip()[-400:]
        raise UserError(f"vLLM ended with {self.process.wait()}: {end}")


def engine(
    folder: Path, count: int, new: int, dtype: str, gamma: int | None, compiled: bool
) -> None:
    """τ, accepted counts and tokens/s of both, prompt by prompt in turn; `compiled`: through
    torch.compile too. Where our decoder finds a static tree fastest, which the engine's CPU backend
    has not, it also drafts that."""
    family = checkpoint.read_card(folder).family
    served_as = export.layout_of(family, "hf").method
    if not (VENV / "bin" / "python").exists():
        raise UserError(f"{VENV} holds no serving environment: run scripts/serving-env first")
    target = target_of(folder, dtype)
    dtype = str(target.dtype).removeprefix("torch.")
    drafter = next(iter(drafts_of([folder], target).values()))
    gamma = gamma or drafter.depth
    asked, learning = apart(held_out(folder, target, count + LEARNING), count)
    ways: dict[str, Variant] = {}
    methods: dict[str, str] = {}  # of those that the engine has, too
    found = acceptance_by_rank(target, drafter, learning, new, drafter.depth)
    modes = {"": False} | ({", compiled": True} if compiled else {})
    for mode, through in modes.items():
        job = Job(target, drafter, DecodeConfig(compile=through), Sampler(0.0))
        fastest = fastest_shape(job, learning[:1], found)
        mine = partial(ours, target, new, compiled=through)
        ways[f"plain{mode}"] = mine()
        ways[f"speculative{mode}"] = mine(drafter=drafter, shape=Chain(gamma))
        methods |= {f"plain{mode}": "none", f"speculative{mode}": served_as}
        if isinstance(fastest, Static):
            ways[f"tree of {fastest.nodes}{mode}"] = mine(drafter=drafter, shape=fastest)
    made: dict[str, list[Generation]] = {k: [] for k in ways}
    spent: dict[str, list[float]] = {k: [] for k in ways}
    served: dict[str, list[Served]] = {k: [] for k in methods}
    with ExitStack() as stack, bars(console) as progress:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        export.write(root / "draft", drafter, target)
        target.save(root / "target")
        task = progress.add_task("warming up", total=len(ways) + len(methods))
        for way in ways.values():  # compiles, too
            for prompt in warm_ups(asked, way.compiled):
                way.run(prompt)
            progress.advance(task)
        engines: dict[str, Engine] = {}
        for name, method in methods.items():
            through = ways[name].compiled
            engines[name] = stack.enter_context(Engine(root, method, gamma, dtype, through))
            for prompt in warm_ups(asked, through):
                engines[name].answer(prompt, new)
            progress.advance(task)
        task = progress.add_task("decoding", total=len(asked))
        for prompt in asked:  # all take turns
            for name, way in ways.items():
                seconds, result = timed(partial(way.run, prompt))
                made[name].append(result)
                spent[name].append(seconds)
                if name in engines:
                    served[name].append(engines[name].answer(prompt, new))
            progress.advance(task)
        console.print(
            f"{len(asked)} held-out prompts, up to {new} new tokens, greedy, γ = {gamma}, {dtype}, "
            "one stream; whole calls, with prefill, all taking turns"
        )
        console.print(_table(made, spent, served))
        if dtype == "float32":  # the texts are the same
            return
        texts = made["speculative"]
        pieces = [pieces_of(engines["speculative"], g, gamma) for g in texts]
    shared, theirs = on_shared_text(target, drafter, gamma, texts, pieces)
    console.print(
        f"over {sum(len(g.ids) for g in shared)} of {sum(len(g.ids) for g in texts)} tokens, those "
        f"that both write after the same text: τ {_engines_tau(theirs)} in vLLM, "
        f"{tau_of(shared)} here (eager)"
    )


def _table(
    made: dict[str, list[Generation]],
    spent: dict[str, list[float]],
    served: dict[str, list[Served]],
) -> Table:
    table = Table("", "τ", "accepted by position", "rounds", "same ids", "tokens/s", "times vLLM")
    for name, theirs in served.items():
        drafts = sum(s.drafts for s in theirs)
        accepted = map(sum, zip(*(s.accepted_per_pos for s in theirs), strict=True))
        shares = " ".join(f"{a / drafts:.3f}" for a in accepted if drafts)
        seconds = sum(s.seconds for s in theirs)
        speed = f"{sum(len(s.ids) for s in theirs) / seconds:.1f}"
        table.add_row(f"vLLM, {name}", _engines_tau(theirs), shares, str(drafts), "", speed, "")
    for name, results in made.items():
        rounds = [r for g in results for r in g.rounds]
        deep = max(r.drafted for r in rounds)  # 0 where nothing is drafted
        shares = " ".join(
            f"{sum(r.accepted > k for r in rounds) / len(rounds):.3f}" for k in range(deep)
        )
        rival = served["speculative" + ", compiled" * name.endswith("compiled")]
        same = ""
        if name in served:
            rival = served[name]
            alike = sum(g.ids == s.ids for g, s in zip(results, rival, strict=True))
            same = f"{alike} of {len(results)}"
        a_token = [s / len(g.ids) for s, g in zip(spent[name], results, strict=True)]
        faster = ratio([s.seconds / len(s.ids) for s in rival], a_token)
        tau = tau_of(results) if deep else ""
        speed = f"{sum(len(g.ids) for g in results) / sum(spent[name]):.1f}"
        table.add_row(f"ours, {name}", tau, shares, str(len(rounds)), same, speed, faster)
    return table


def pieces_of(engine: Engine, ours: Generation, gamma: int) -> list[tuple[int, Served]]:
    """The stretches of our answer that the engine writes too, each with where it starts: in
    bfloat16 near-ties flip, so wherever the engine leaves our text it is put back on it. A
    stretch ends γ tokens early: the last round's draft is then of tokens that both write."""
    found, start, text = [], 0, ours.ids
    while start < len(text):
        before = ours.prompt + text[:start]
        alike = _alike(engine.answer(before, len(text) - start).ids, text[start:])
        if alike > gamma + 1:
            found.append((start, engine.answer(before, alike - gamma)))
        start += alike + 1
    return found


def on_shared_text(
    target: Target,
    drafter: Drafter,
    gamma: int,
    texts: list[Generation],
    pieces: list[list[tuple[int, Served]]],
) -> tuple[list[Generation], list[Served]]:
    """Our decoding of the engine's pieces of our texts, and its answers to them, where both write
    the same tokens."""
    ours, theirs = [], []
    for text, found in zip(texts, pieces, strict=True):
        for start, piece in found:
            before = text.prompt + text.ids[:start]
            limit = len(piece.ids)
            again = generate(target, before, max_new_tokens=limit, drafter=drafter, gamma=gamma)
            if again.ids == piece.ids:
                ours.append(again)
                theirs.append(piece)
    return ours, theirs


def _alike(one: list[int], two: list[int]) -> int:
    """How many tokens two answers begin with in common."""
    same = [a == b for a, b in zip(one, two, strict=False)]
    return same.index(False) if False in same else len(same)


def _engines_tau(served: list[Served]) -> str:
    drafts = sum(s.drafts for s in served)
    return f"{1 + sum(s.accepted for s in served) / drafts:.3f}" if drafts else ""

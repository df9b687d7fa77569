"""The same exported head in vLLM on the CPU and in our decoder, on the same greedy prompts."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from benches.speed import ratio
from benches.subject import apart, console, drafts_of, held_out, target_of, timed, warm_ups
from rich.table import Table

from specdec.decoding.answers import Generation
from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import generate
from specdec.decoding.static_tree import acceptance_by_rank
from specdec.drafters import Drafter
from specdec.errors import UserError
from specdec.files import record
from specdec.formats import draft as checkpoint
from specdec.formats import export
from specdec.measure.strategy import LEARNING, fastest_shape
from specdec.progress import bars
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Shape, Static
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


@dataclass
class Said:
    """A line of scripts/engine.py, whose counters are lists, and missing without a draft."""

    ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    num_drafts: list[int] = field(default_factory=list)
    num_draft_tokens: list[int] = field(default_factory=list)
    num_accepted_tokens: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass
class Way:
    """One way in which our decoder answers."""

    drafter: Drafter | None
    shape: Shape | None
    compiled: bool

    def answer(self, target: Target, prompt: list[int], new: int) -> Generation:
        return generate(
            target,
            prompt,
            max_new_tokens=new,
            drafter=self.drafter,
            shape=self.shape,
            compiled=self.compiled,
        )


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
        return Served(
            said.ids,
            said.seconds,
            sum(said.num_drafts),
            sum(said.num_accepted_tokens),
            said.num_accepted_tokens_per_pos,
        )

    def _heard(self) -> Said:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                known = {f.name for f in fields(Said)}  # vLLM may count more than is read here
                said = {k: v for k, v in json.loads(line[1:]).items() if k in known}
                return record(Said, said, "vLLM")
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
    ways: dict[str, Way] = {}
    found = acceptance_by_rank(target, drafter, learning, new, drafter.depth)
    modes = {"": False} | ({", compiled": True} if compiled else {})
    for mode, through in modes.items():
        fastest = fastest_shape(
            found, target, drafter, learning[:1], DecodeConfig(compile=through), Sampler(0.0)
        )
        ways[f"plain{mode}"] = Way(None, None, through)
        ways[f"speculative{mode}"] = Way(drafter, Chain(gamma), through)
        if isinstance(fastest, Static):
            ways[f"tree of {fastest.nodes}{mode}"] = Way(drafter, fastest, through)
    made: dict[str, list[Generation]] = {k: [] for k in ways}
    spent: dict[str, list[float]] = {k: [] for k in ways}
    rivals = [name for name, way in ways.items() if not isinstance(way.shape, Static)]
    served: dict[str, list[Served]] = {k: [] for k in rivals}
    with ExitStack() as stack, bars(console) as progress:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        export.write(root / "draft", drafter, target)
        target.save(root / "target")
        task = progress.add_task("warming up", total=len(ways) + len(rivals))
        for way in ways.values():  # compiles, too
            for prompt in warm_ups(asked, way.compiled):
                way.answer(target, prompt, new)
            progress.advance(task)
        engines: dict[str, Engine] = {}
        for name in rivals:
            method = served_as if ways[name].drafter is not None else "none"
            through = ways[name].compiled
            engines[name] = stack.enter_context(Engine(root, method, gamma, dtype, through))
            for prompt in warm_ups(asked, through):
                engines[name].answer(prompt, new)
            progress.advance(task)
        task = progress.add_task("decoding", total=len(asked))
        for prompt in asked:  # all take turns
            for name, way in ways.items():
                seconds, result = timed(partial(way.answer, target, prompt, new))
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
        f"{_tau(shared)} here (eager)"
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
        tau = _tau(results) if deep else ""
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


def _tau(made: list[Generation]) -> str:
    return f"{sum(g.emitted for g in made) / max(1, sum(len(g.rounds) for g in made)):.3f}"

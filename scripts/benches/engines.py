"""Compares exported drafts in serving engines with our decoder, by greedy responses in float32."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

from benches.setting import BenchSetting, Timing, setting
from benches.turns import show

from specdec.decoding.decode import generate
from specdec.decoding.generation import Generation
from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.engines.engine_interface import DraftToServe, Engine, TargetToServe
from specdec.engines.known_engines import CORE, ENGINES
from specdec.engines.local_server import local_server, require_installed
from specdec.errors import UserError, require
from specdec.formats import draft_export
from specdec.formats.gguf_target import float32_gguf
from specdec.measure.served import MeasuredServer, TimedResponse
from specdec.progress import console
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets.gguf import require_gguf
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig

STARTS = 600.0  # seconds that an engine may take to start
NONE = "—"


def engines(
    drafts: Sequence[Path],
    *,
    prompts: int = 8,
    new: Annotated[int, "new tokens per response"] = 48,
    gamma: Annotated[int, "drafted tokens per speculation step"] = 2,
    engines: Annotated[Sequence[str], "installed ones"] = tuple(CORE),
) -> None:
    """Compares each draft in each engine with our decoder: token ids and accepted counts.

    The engines run on this machine, in float32, from their own environments (scripts/serving-env,
    scripts/llama-cpp-env). A row gives the number of prompts with the same token ids, and with the
    same number of accepted tokens at each position. Greedy decoding, one response at a time.
    """
    at_hand = setting(drafts, Timing(prompts, new, "float32", gamma))
    rows = []
    for name, drafter in at_hand.drafters.items():
        require(gamma <= drafter.depth, f"--gamma {gamma}: {name} drafts {drafter.depth} tokens")
        way = Way(drafter, Chain(gamma))
        made = [generate(at_hand.target, p, way, max_new_tokens=new) for p in at_hand.prompts]
        for each in engines:
            engine = ENGINES.named(each)
            rows.append([engine.title, name, *_row(engine, at_hand, drafter, gamma, new, made)])
    columns = ["engine", "draft", "same ids", "same accepted counts", "steps", "steps, ours"]
    show([*columns, "accepted", "accepted, ours"], rows)


def _row(
    engine: Engine,
    at_hand: BenchSetting,
    drafter: Drafter,
    gamma: int,
    new: int,
    made: Sequence[Generation],
) -> list[str]:
    if drafter.config.name not in engine.layouts:
        return ["no export for this engine"]
    try:
        with served_draft(engine, at_hand.target, drafter, gamma) as server:
            theirs = [server.reply(g.prompt, new, Sampler(0.0), 0) for g in made]
    except UserError as error:
        console.print(f"{engine.title}, {drafter.config.name}: {error}")
        return [NONE]
    limit = new if engine.drafts_within_limit else None
    ours = [accepted_by_position(g, gamma, limit) for g in made]
    counts = [positions(reply, gamma) for reply in theirs]
    return [
        _of(reply.ids == g.ids for reply, g in zip(theirs, made, strict=True)),
        _of(a == b for a, b in zip(counts, ours, strict=True)),
        str(sum(reply.speculation_steps for reply in theirs)),
        str(sum(len(g.steps) for g in made)),
        str(sum(map(sum, counts))),
        str(sum(map(sum, ours))),
    ]


def accepted_by_position(made: Generation, gamma: int, limit: int | None = None) -> list[int]:
    """The number of speculation steps that accepted each position. With a `limit`, no draft
    continues beyond the last but one of so many new tokens: the step itself adds one more."""
    start = len(made.prompt) - 1
    most = [gamma if limit is None else limit - 1 - (r.anchor - start) for r in made.steps]
    accepted = [min(r.accepted, n) for r, n in zip(made.steps, most, strict=True)]
    return [sum(n > k for n in accepted) for k in range(gamma)]


def positions(reply: TimedResponse, gamma: int) -> list[int]:
    """An engine's counts for each position, of which it may omit the last."""
    return [n for n, _ in zip_longest(reply.accepted, range(gamma), fillvalue=0)]


def _of(same: Iterator[bool]) -> str:
    each = [*same]
    return f"{sum(each)} of {len(each)}"


@contextmanager
def served_draft(
    engine: Engine, target: Target, drafter: Drafter, gamma: int
) -> Iterator[MeasuredServer]:
    family = drafter.config.name
    layout = engine.layouts[family]
    require_installed(engine)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        draft = root / f"draft{draft_export.layout_of(family, layout).suffix}"
        draft_export.write_export(draft, drafter, target, layout)
        if engine.reads_gguf:
            gguf = require_gguf(target.name, None, engine.title)
            model = float32_gguf(gguf, Path(TargetConfig().cache))
        else:
            target.save(model := root / "target")
        served = TargetToServe(str(model.resolve()), target.name, "float32")
        options = engine.draft_options(DraftToServe(draft, family, layout, gamma))
        with local_server(engine, served, options, root / "engine.log", STARTS) as server:
            yield MeasuredServer(server, target, speculates=True)

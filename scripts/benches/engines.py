"""Compares exported drafts in serving engines with our decoder, by greedy responses in float32.

`scripts/bench engines` prints the table for the drafts of a user, and `pytest -m serving
tests/test_end_to_end.py` for a draft of each method (the tests make its rows by
`DraftServers.comparison` and require them to be equal).
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Self

from benches.engine import WORKERS
from benches.setting import Timing, setting
from benches.turns import TimedGeneration, show

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

OF_DRAFTS = tuple(name for name in CORE if ENGINES[name].layouts)  # they serve exports
STARTS = 600.0  # seconds that an engine may take to start
Respond = Callable[[list[int], int], TimedResponse | TimedGeneration]


def engines(
    drafts: Sequence[Path],
    *,
    prompts: int = 8,
    new: Annotated[int, "new tokens per response"] = 48,
    gamma: Annotated[int, "drafted tokens per speculation step"] = 2,
    engines: Annotated[Sequence[str], "installed ones"] = OF_DRAFTS,
) -> None:
    """Compares each draft in each engine with our decoder: token ids and accepted counts.

    The engines run on this machine, in float32, from their own environments (scripts/serving-env,
    scripts/llama-cpp-env). A row gives the number of prompts with the same token ids, and with the
    same number of speculation steps and of accepted tokens at each position. Greedy decoding, one
    response at a time.
    """
    at_hand = setting(drafts, Timing(prompts, new, "float32", gamma))
    rows = list[dict[str, str]]()
    with DraftServers(at_hand.target) as servers:
        for name, drafter in at_hand.drafters.items():
            deep = drafter.depth
            require(gamma <= deep, f"--gamma {gamma}: {name} drafts {deep} tokens")
            way = Way(drafter, Chain(gamma))
            ours = [generate(at_hand.target, p, way, max_new_tokens=new) for p in at_hand.prompts]
            for each in engines:
                engine = ENGINES.named(each)
                try:
                    cells = servers.comparison(engine, drafter, ours, gamma, new).cells
                except UserError as error:
                    console.print(f"{engine.title}, {name}: {error}")
                    cells = {"engine": engine.title, "method": drafter.config.name}
                    cells["same ids"] = "not served"
                rows.append({"draft": name, **cells})
    columns = max(rows, key=len)
    show([*columns], [[*row.values()] for row in rows])


@dataclass(frozen=True)
class EngineComparison:
    """A row of the table: the responses of an engine with a draft, and ours. `same_counts` are the
    prompts whose responses took the same number of speculation steps and accepted the same number
    of tokens at each position."""

    engine: str
    method: str
    prompts: int
    same_ids: int
    same_counts: int
    steps: int
    own_steps: int
    accepted: list[int]  # over all prompts, by position
    own_accepted: list[int]

    @property
    def is_equal(self) -> bool:
        return self.same_ids == self.same_counts == self.prompts

    @property
    def cells(self) -> dict[str, str]:
        """The cells of the row, by column."""
        return {
            "engine": self.engine,
            "method": self.method,
            "same ids": f"{self.same_ids} of {self.prompts}",
            "same accepted counts": f"{self.same_counts} of {self.prompts}",
            "speculation steps": str(self.steps),
            "our steps": str(self.own_steps),
            "accepted by position": " ".join(map(str, self.accepted)),
            "accepted by ours": " ".join(map(str, self.own_accepted)),
        }


class DraftServers:
    """Serves drafts of a target in engines on this machine, in float32, one at a time. A context
    manager: an engine that stays imported between drafts ends with it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._stack, self._workers = ExitStack(), dict[str, Any]()
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def worker(self, name: str) -> Any:
        """The process that keeps this engine imported; it is started if none runs."""
        if name not in self._workers or self._workers[name].process.poll() is not None:
            require_installed(ENGINES.named(name))
            self._workers[name] = self._stack.enter_context(WORKERS[name]())
        return self._workers[name]

    @property
    def target_folder(self) -> Path:
        """The target as engines load it, written at the first call."""
        if self._folder is None:
            temporary = self._stack.enter_context(tempfile.TemporaryDirectory())
            self.target.save(folder := Path(temporary).resolve() / "target")
            self._folder = folder
        return self._folder

    def comparison(
        self, engine: Engine, drafter: Drafter, ours: Sequence[Generation], gamma: int, limit: int
    ) -> EngineComparison:
        """The engine's responses with this draft to the prompts of our responses, which have at
        most `limit` tokens, compared with them. Raises UserError for a draft that the engine does
        not serve."""
        with self.serving(engine, drafter, gamma) as respond:
            theirs = [respond(g.prompt, limit) for g in ours]
        within = limit if engine.drafts_within_limit else None
        own = [(len(g.steps), accepted_by_position(g, gamma, within)) for g in ours]
        counted = [(r.speculation_steps, _positions(r.accepted, gamma)) for r in theirs]
        return EngineComparison(
            engine=engine.title,
            method=drafter.config.name,
            prompts=len(ours),
            same_ids=sum(r.ids == g.ids for r, g in zip(theirs, ours, strict=True)),
            same_counts=sum(a == b for a, b in zip(counted, own, strict=True)),
            steps=sum(steps for steps, _ in counted),
            own_steps=sum(steps for steps, _ in own),
            accepted=_summed(accepted for _, accepted in counted),
            own_accepted=_summed(accepted for _, accepted in own),
        )

    @contextmanager
    def serving(self, engine: Engine, drafter: Drafter, gamma: int) -> Iterator[Respond]:
        """A function that answers a prompt with at most so many tokens, by the engine with this
        draft. Raises UserError if the engine does not serve it."""
        family = drafter.config.name
        layout = engine.layouts.get(family)
        if layout is None:
            raise UserError(f"it has no method for a draft of {family}")
        require_installed(engine)
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder).resolve()
            draft = root / f"draft{draft_export.layout_of(family, layout).suffix}"
            draft_export.write_export(draft, drafter, self.target, layout)
            if engine.name in WORKERS:
                worker = self.worker(engine.name)
                worker.serve(self.target_folder, draft, family, gamma, "float32")
                yield worker.answer
                return
            if engine.reads_gguf:
                gguf = require_gguf(self.target.name, None, engine.title)
                model = float32_gguf(gguf, Path(TargetConfig().cache))
            else:
                model = self.target_folder
            served = TargetToServe(str(model.resolve()), self.target.name, "float32")
            options = engine.draft_options(DraftToServe(draft, family, layout, gamma))
            with local_server(engine, served, options, root / "engine.log", STARTS) as server:
                measured = MeasuredServer(server, self.target, speculates=True)
                yield partial(measured.reply, sampler=Sampler(0.0), seed=0)


def accepted_by_position(ours: Generation, gamma: int, limit: int | None = None) -> list[int]:
    """The number of speculation steps that accepted each position. With a `limit`, no draft
    continues beyond the last but one of so many new tokens: the step itself adds one more."""
    start = len(ours.prompt) - 1
    most = [gamma if limit is None else limit - 1 - (r.anchor - start) for r in ours.steps]
    accepted = [min(r.accepted, n) for r, n in zip(ours.steps, most, strict=True)]
    return [sum(n > k for n in accepted) for k in range(gamma)]


def _positions(accepted: Sequence[int], gamma: int) -> list[int]:
    """An engine's counts for each position, of which it may omit the last."""
    return [n for n, _ in zip_longest(accepted, range(gamma), fillvalue=0)]


def _summed(counts: Iterator[list[int]]) -> list[int]:
    return [sum(of) for of in zip_longest(*counts, fillvalue=0)]

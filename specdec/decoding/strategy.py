"""How a draft is decoded: the shape of its rounds, how long they are, and what they cost.

`DecodeConfig` is what a user says; `strategy` turns it into a shape and a length policy, and
measures first what those must know: costs, acceptance by rank, records for a stop classifier.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from specdec.context import Needs
from specdec.decoding.decode import capacity, decode, fitting_rule, generate
from specdec.decoding.disco import Disco, Recorder, fit
from specdec.decoding.length import LENGTHS, CostTable, Fixed, Goodput, length
from specdec.decoding.policy import Length
from specdec.decoding.rows import Rows
from specdec.decoding.static_tree import (
    acceptance_by_rank,
    best_static,
    expected_static,
    fastest_static,
)
from specdec.drafters.base import Drafter, last_of
from specdec.errors import nearest, require, typed
from specdec.sampling.choose import Choose
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import BestFirst, Chain, Dynamic, Shape, Static
from specdec.target.base import Target
from specdec.theory.leviathan import interpolate

TREES = ("static", "dynamic", "best_first")
NODES = 12  # of a tree
SIZES = {"cpu": (1, 3, 7, 15)}  # nodes of the trees whose rounds are timed, by device
MORE = (1, 7, 15, 31, 63)  # on others
TIMED, TURNS = 48, 5  # tokens that are decoded to time them, and how often
LEARNING = 6  # prompts that a tree or a stop classifier is chosen on
MEASURED = {"optimal": "c", "goodput": "table", "disco": "path"}  # unless the settings give it


@dataclass
class DecodeConfig:
    """How drafts are decoded and measured.

    `gamma` null drafts as deep as was trained. `tree` null is a chain; static, dynamic (EAGLE-2)
    and best_first (parallel heads) draft up to `nodes` tokens (null: 12), a static one those of
    `paths`, or the best `nodes` for acceptance measured first (null: what commits most tokens a
    second, by times measured too; a chain, perhaps). `length` is a policy that shortens chains,
    with its `settings` (the fields of its config in specdec/decoding/length.py). `rule` auto is
    block for chains, recursive or point_mass for trees; parameters follow its name:
    lenience:factor=0.8.
    `temperatures` are each measured apart, with `top_p` and `top_k`. `repeats` times every prompt
    is decoded, for steadier seconds; counts come from the first. `compile` runs target and draft
    (eagle3, lm) through torch.compile. `batch` prompts are answered at a time and timed together.
    """

    gamma: int | None = None
    prompts: int = 40
    max_new_tokens: int = 96
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    top_p: float = 1.0
    top_k: int = 0
    rule: str = "auto"
    greedy_draft: bool = False
    tree: str | None = None
    nodes: int | None = None
    branches: int = 4  # children that a node of a dynamic tree may have
    paths: list[list[int]] | None = None
    length: str = "fixed"
    settings: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    repeats: int = 1
    batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "max_new_tokens", "repeats", "batch", "nodes", "branches"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"decode.{name}={value}: give 1 or more")
        require(
            self.gamma is None or self.gamma >= 1,
            f"decode.gamma={self.gamma}: give 1 or more, or null for the trained depth",
        )
        require(bool(self.temperatures), "decode.temperatures is empty: give at least one")
        if self.tree is not None:
            require(
                self.tree in TREES,
                f"decode.tree={self.tree!r} is unknown{nearest(self.tree, TREES)}",
            )
        require(
            self.length in LENGTHS,
            f"decode.length={self.length!r} is unknown{nearest(self.length, LENGTHS)}",
        )
        require(
            self.tree is None or (self.length == "fixed" and not self.settings),
            f"decode.length={self.length} shortens chains: give decode.tree=null with it",
        )
        require(
            self.paths is None or self.tree == "static",
            "decode.paths are of a static tree: give decode.tree=static with them",
        )
        if self.paths is not None:
            Static(self.paths)  # raises where they are no tree
        for temperature in self.temperatures:
            sampler = Sampler(temperature, self.top_k, self.top_p)  # raises where out of range
            like = Chain(1) if self.tree is None else Static([[0]], fixed=self.tree != "static")
            fitting_rule(self.rule, like, sampler, self.greedy_draft)


@dataclass
class Strategy:
    """What a round drafts, and a maker of fresh length policies (None: always the whole)."""

    shape: Shape
    length: Callable[[], Length] | None
    notes: dict[str, Any]  # what was measured to choose them, for the report


def strategy(
    cfg: DecodeConfig, target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]]
) -> Strategy:
    """The shape and the length that `cfg` asks for. Raises UserError where the drafter cannot.

    What must be measured for them is measured on the first of `prompts`, which are best not
    those that the result is then measured on.
    """
    require_fitting(cfg, drafter)
    gamma = drafter.depth if cfg.gamma is None else cfg.gamma
    learning = prompts[:LEARNING]
    notes: dict[str, Any] = {}
    measured: dict[str, Any] = {
        "compiled": cfg.compile,
        "batch": cfg.batch,
        "new": cfg.max_new_tokens,
    }
    if cfg.tree == "dynamic":
        return Strategy(Dynamic(gamma, cfg.nodes or NODES, cfg.branches), None, notes)
    if cfg.tree == "best_first":
        return Strategy(BestFirst(gamma, cfg.nodes or NODES), None, notes)
    if cfg.tree == "static":
        if cfg.paths:
            return Strategy(Static(cfg.paths), None, notes)
        found = acceptance_by_rank(target, drafter, learning, cfg.max_new_tokens, gamma)
        shape: Shape
        if cfg.nodes is None:
            shape = fastest_shape(found, target, drafter, learning, **measured)
        else:
            shape = best_static(found, cfg.nodes)
        paths = shape.paths if isinstance(shape, Static) else straight(shape.depth)
        notes["paths"] = [list(p) for p in paths]
        return Strategy(shape, None, notes)
    chain, settings = Chain(gamma), {"limit": gamma} | dict(cfg.settings)
    if cfg.length == "fixed":
        return Strategy(Chain(typed(Fixed.Config, settings, "decode.settings").limit), None, notes)
    if not is_measured(cfg):
        return Strategy(chain, lambda: length(cfg.length, settings), notes | {"settings": settings})
    if cfg.length == "optimal":
        cost = costs(target, drafter, prompts[0], chain, **measured)
        settings |= {"c": cost["c"], "v": {gamma: cost["v"]}}
        return Strategy(chain, lambda: length(cfg.length, settings), notes | {"settings": settings})
    if cfg.length == "goodput":
        table = cost_table(target, drafter, prompts[0], gamma, **measured)
        notes["cost_table"] = table.seconds
        goodput = typed(Goodput.Config, settings, "decode.settings")
        return Strategy(chain, lambda: Goodput(goodput, table), notes)
    recorder = Recorder(gamma)
    for prompt in learning:
        options: dict[str, Any] = {"drafter": drafter, "gamma": gamma, "length": recorder}
        generate(target, prompt, max_new_tokens=cfg.max_new_tokens, **options)
    classifier = fit(*recorder.records())
    disco = typed(Disco.Config, settings, "decode.settings")
    return Strategy(chain, lambda: Disco(disco, classifier), notes)


def is_measured(cfg: DecodeConfig) -> bool:
    """Whether the length must know something that its settings do not give."""
    name = MEASURED.get(cfg.length)
    return name is not None and cfg.settings.get(name) in (None, "")


def require_fitting(cfg: DecodeConfig, drafter: Drafter) -> None:
    """Raise UserError where `cfg` asks what the drafter, or the length policy, cannot do; before
    anything is measured."""
    name, most = drafter.config.name, drafter.max_depth
    gamma = drafter.depth if cfg.gamma is None else cfg.gamma
    if cfg.paths is not None:
        gamma = Static(cfg.paths).depth
    require(
        most is None or gamma <= most,
        f"decode.gamma={gamma}, or that depth of decode.paths: this drafter has {most} heads and "
        "drafts no more",
    )
    require(
        cfg.tree != "best_first" or drafter.parallel,
        f"decode.tree=best_first needs parallel heads, and {name} drafts one token after another: "
        "give static or dynamic",
    )
    require(
        not drafter.copies or cfg.tree != "static" or cfg.paths is not None,
        f"decode.tree=static: {name} copies tokens and has no ranks to measure: give "
        "decode.tree=dynamic, or decode.paths",
    )
    require(
        not drafter.copies or not LENGTHS[cfg.length].reads_q,
        f"decode.length={cfg.length} reads q: {name} copies tokens and has none",
    )
    settings = {"limit": gamma} | dict(cfg.settings)
    limit = typed(LENGTHS[cfg.length].Config, settings, "decode.settings").limit
    require(limit >= 1, f"decode.settings.limit={limit}: give 1 or more")
    require(
        limit <= gamma,
        f"decode.settings.limit={limit} is above γ = {gamma} and would never be reached: give "
        f"decode.gamma={limit}",
    )
    if cfg.tree is None and not is_measured(cfg):
        length(cfg.length, settings)


def fastest_shape(
    acceptance_DR: torch.Tensor,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    compiled: bool = False,
    batch: int = 1,
    new: int = 96,
) -> Shape:
    """The static tree, or the chain, of at most D tokens in a line that should commit most tokens a
    second: by acceptance (see `acceptance_by_rank`) and by the seconds of whole rounds, measured
    while decoding `prompts` as a batch of `batch`."""
    depth = len(acceptance_DR)
    rows = [prompts[b % len(prompts)] for b in range(batch)]
    sizes = SIZES.get(target.device.type, MORE)
    shapes: list[Shape] = [Chain(d) for d in range(1, depth + 1)]
    shapes += [Static([[rank] for rank in range(nodes)]) for nodes in sizes]  # stars
    options = {"max_new_tokens": min(new, TIMED), "eos": (), "compiled": compiled}
    times = rounds_in_turn(target, drafter, rows, shapes, **options)
    chains = times[:depth]
    stars = list(accumulate((whole for whole, _ in times[depth:]), max))  # never falling

    def seconds(d: int, nodes: int) -> float:
        return interpolate(sizes, stars, nodes) + chains[d - 1][1] - chains[0][1]

    tree = fastest_static(acceptance_DR, seconds, sizes[-1])
    rate, best = max(
        (expected_static(acceptance_DR, straight(d)) / chains[d - 1][0], d)
        for d in range(1, depth + 1)
    )
    of_tree = expected_static(acceptance_DR, tree.paths) / seconds(tree.depth, tree.nodes)
    return tree if of_tree > rate else Chain(best)


def straight(depth: int) -> list[list[int]]:
    """A chain as paths of a tree."""
    return [[0] * (d + 1) for d in range(depth)]


def rounds_in_turn(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    shapes: Sequence[Shape],
    **options: Any,
) -> list[tuple[float, float]]:
    """Of each shape the seconds of a round of decoding these prompts as a batch, and those of its
    drafting: medians of `TURNS` times, the shapes taking turns, after one that warms up."""
    found: list[list[tuple[float, float]]] = [[] for _ in shapes]
    for turn in range(1 + TURNS):
        for shape, times in zip(shapes, found, strict=True):
            made = decode(target, prompts, drafter=drafter, shape=shape, **options)
            last = max(made, key=lambda g: g.seconds)
            rounds = max(1, max(len(g.rounds) for g in made))
            if turn:
                times.append((last.seconds / rounds, last.spent["draft"] / rounds))
    return [(statistics.median(w for w, _ in t), statistics.median(d for _, d in t)) for t in found]


@torch.inference_mode()
def costs(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    shape: Shape,
    repeats: int = 31,
    compiled: bool = False,
    batch: int = 1,
    new: int = 96,
) -> dict[str, float]:
    """Medians in seconds after a prompt: one plain step, one verification of as many tokens as the
    shape can draft and the anchor, one drafting. From them c = draft / (γ · step), the cost of one
    draft step over one target step (γ the depth of the shape), and v = verify / step. They take
    turns, so that each finds the processor's caches as decoding leaves them. `new`: the
    tokens that decoding makes room for, which a compiled pass depends on. Of a prompt that leaves
    the draft no positions, the end alone is read."""
    if drafter.positions is not None:
        prompt = prompt[-max(1, drafter.positions - 1 - shape.depth) :]
    half = max(1, len(prompt) // 2)
    prompts = [prompt[b % half :] for b in range(batch)]  # of unlike length, as rows come to be
    rows = Rows(prompts, target.device)
    slots = capacity(len(prompt) + new, drafter, shape) if compiled else None
    cache = target.new_cache(slots)
    draft_cache = drafter.compiled_cache(slots) if slots else drafter.new_cache()
    features, final = target.features(rows.ids(), drafter.needs, cache=cache)
    counts = [len(p) for p in prompts]
    cache.keep(counts)
    first = target.logits(last_of(final, counts)).argmax(-1).tolist()
    rows.extend([[token] for token in first], features, counts, None)
    choose = Choose(Sampler(0.0), "fixed", [], drafter.vocab_S, target.vocab_size)
    ctx = rows.context()
    ctx.cache = cache

    def clock(run: Callable[[], Any]) -> float:
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def step(count: int, needs: Needs, tree: bool = False) -> None:
        parents = torch.arange(count, device=target.device).clamp_max(1) - 1  # the anchor's
        parents_BM = parents.expand(batch, -1) if tree else None
        _, logits = target.step(rows.anchors().expand(-1, count), needs, cache, parents_BM)
        logits.float().argmax(-1)
        cache.drop()

    room = target.positions - max(cache.lengths)
    parts: list[Callable[[], Any]] = [
        lambda: step(1, Needs()),
        lambda: drafter.draft(ctx, shape, choose, draft_cache),
        lambda: step(min(1 + shape.nodes, room), drafter.needs, not isinstance(shape, Chain)),
    ]
    times = [[clock(part) for part in parts] for _ in range(repeats + 2)][2:]
    plain, draft, verify = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "step_seconds": plain,
        "verify_seconds": verify,
        "draft_seconds": draft,
        "c": draft / shape.depth / plain,
        "v": verify / plain,
    }


def cost_table(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    gamma: int,
    compiled: bool = False,
    batch: int = 1,
    new: int = 96,
) -> CostTable:
    """Seconds of a round by rows, up to `batch`, and drafted tokens, for length goodput."""
    batches = sorted({1, (batch + 1) // 2, batch})
    gammas = sorted({1, (gamma + 1) // 2, gamma})
    seconds = []
    for rows in batches:
        found = [costs(target, drafter, prompt, Chain(g), 5, compiled, rows, new) for g in gammas]
        rounds = [cost["verify_seconds"] + cost["draft_seconds"] for cost in found]
        seconds.append([found[0]["step_seconds"], *rounds])
    return CostTable(batches, [0, *gammas], seconds)

"""What a round drafts at one temperature. What `DecodeConfig` leaves open is chosen by measuring,
anew at each temperature, as acceptance differs: a tree by the acceptance of each rank and the times
of whole rounds, a draft length by costs or a stop classifier. Letters: D depths, R sibling ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specdec.decoding.answers import Round
from specdec.decoding.config import DecodeConfig, is_measured, require_fitting
from specdec.decoding.disco import Recorder, StopClassifier, fit
from specdec.decoding.length import CostTable, length
from specdec.decoding.policy import Length
from specdec.drafters.base import Drafter
from specdec.drafters.capabilities import Weighs
from specdec.measure.costs import OF_ROUNDS, TIMED, cost_table, costs, rounds_in_turn
from specdec.measure.setup import Setup
from specdec.sampling.trees import BestFirst, Chain, Dynamic, Shape, Static, best_paths
from specdec.theory.intervals import Interval

NODES = 12  # nodes of a tree, unless given
SIZES = {"cpu": (2, 3, 4, 6)}  # nodes of the trees whose rounds are timed, by device
MORE = (3, 7, 15, 31, 63)  # on other devices
OF_A_CHOICE = 11  # timings behind each cost that a choice depends on
LEARNING = 6  # prompts for choosing a tree or a stop classifier
WEIGHED = 48  # tokens of each answer that `Weighs` learns from


@dataclass
class Learned:
    """Measurements made to choose how to decode; None for those not needed."""

    paths: list[list[int]] | None = None  # of the chosen tree or chain
    acceptance_by_rank: list[list[float]] | None = None  # [D][R], the reason for the choice
    c: Interval | None = None
    v: Interval | None = None
    table: CostTable | None = None
    classifier: StopClassifier | None = None


@dataclass
class Strategy:
    """The shape a round drafts, and a maker of length policies (None: always the whole shape)."""

    shape: Shape
    length: Callable[[], Length] | None = None
    learned: Learned = field(default_factory=Learned)


def strategy(setup: Setup, prompts: Sequence[Sequence[int]]) -> Strategy:
    """The shape and the length policy that `setup.cfg` asks for. Where a choice needs measurements,
    they are taken on the first of `prompts`, which should not be those of the evaluation. Raises
    UserError as `require_fitting` does."""
    cfg, drafter, learning = setup.cfg, setup.drafter, prompts[:LEARNING]
    require_fitting(cfg, drafter)
    gamma = drafter.depth if cfg.gamma is None else cfg.gamma
    if isinstance(drafter, Weighs):
        weigh(setup, drafter, learning, gamma)
    if cfg.tree == "dynamic":
        return Strategy(Dynamic(gamma, cfg.nodes or NODES, cfg.branches))
    if cfg.tree == "best_first":
        return Strategy(BestFirst(gamma, cfg.nodes or NODES))
    if cfg.tree == "static" and cfg.paths:
        return Strategy(Static(cfg.paths))
    if cfg.tree == "static":
        found_DR = acceptance_by_rank(setup, learning, gamma)
        if cfg.nodes is None:
            shape = fastest_shape(setup, learning, found_DR)
        else:
            shape = best_static(found_DR, cfg.nodes)
        return Strategy(shape, None, Learned(paths_of(shape), found_DR.tolist()))
    chain, settings = Chain(gamma), {"limit": gamma} | dict(cfg.settings)
    if cfg.length == "fixed":
        return Strategy(Chain(length("fixed", settings).limit))
    if not is_measured(cfg):
        return Strategy(chain, lambda: length(cfg.length, settings))
    if cfg.length == "optimal":
        found = costs(setup, prompts[0], chain)
        settings |= {"c": found.c.value, "v": {gamma: found.v.value}}
        learned = Learned(c=found.c, v=found.v)
        return Strategy(chain, lambda: length(cfg.length, settings), learned)
    if cfg.length == "goodput":
        table = cost_table(setup, prompts[0], gamma)
        return Strategy(chain, lambda: length(cfg.length, settings, table), Learned(table=table))

    def classified() -> StopClassifier:
        recorder = Recorder(gamma)  # records what this rule accepts at this temperature
        setup.rounds(learning, gamma, recorder)
        return fit(*recorder.records())

    classifier = setup.ranks.first(classified)
    learned = Learned(classifier=classifier)
    return Strategy(chain, lambda: length(cfg.length, settings, classifier), learned)


def weigh(setup: Setup, drafter: Weighs, prompts: Sequence[Sequence[int]], gamma: int) -> None:
    """Let a drafter that chooses what to draft weigh its options, on plain answers to prompts."""

    def cost(member: Drafter, gamma: int) -> tuple[float, float]:
        found = costs(replace(setup, drafter=member), prompts[0], Chain(gamma), OF_A_CHOICE)
        return found.c.value, found.v.value

    new = min(WEIGHED, setup.cfg.max_new_tokens)
    seeds = range(len(prompts))
    made = setup.ranks.first(lambda: setup.answers(prompts, None, max_new_tokens=new, seeds=seeds))
    texts = [[*g.prompt, *g.ids] for g in made]
    masks = [[False] * len(g.prompt) + [True] * len(g.ids) for g in made]
    drafter.weigh(cost, texts, masks, setup.variant(Chain(gamma)))


def acceptance_by_rank(
    setup: Setup, prompts: Sequence[Sequence[int]], depth: int, width: int = 6, **options: Any
) -> Tensor:
    """Acceptance by depth and rank [D, R]: of the rounds that reached a node of the first-ranked
    chain, the share that went on to its child of that rank, where each node of that chain has
    `width` children. Rank r is the r-th likeliest token if siblings are picked (greedy decoding, or
    `greedy_draft`), else the r-th token drawn. `options` are those of `decode`."""
    paths = [(0,) * d + (rank,) for d in range(depth) for rank in range(width)]  # in node order
    taken, reached = torch.zeros(depth, width), torch.zeros(depth, 1)
    options = {"seeds": [0], "compiled": False} | options

    def rounds(prompt: Sequence[int]) -> list[Round]:
        (made,) = setup.answers([prompt], Static(paths), **options)
        return made.rounds

    for of_prompt in setup.ranks.shared(prompts, rounds):
        for r in of_prompt:
            kept = paths[r.path[-1]] if r.path else ()
            for d in range(min(depth, len(kept) + 1)):
                if any(kept[:d]):
                    break
                reached[d] += 1
                if len(kept) > d:
                    taken[d, kept[d]] += 1
    return taken / reached.clamp_min(1)


def best_static(acceptance_DR: Tensor, nodes: int) -> Static:
    """The static tree of this many nodes with the largest expected accepted length, from
    `acceptance_by_rank`, as Sequoia (Chen et al. 2024) and Medusa build theirs."""
    falling_DR = acceptance_DR.clamp(1e-6, 1).cummin(-1).values
    return Static(best_paths(falling_DR.log().tolist(), nodes))


def expected_static(acceptance_DR: Tensor, paths: Sequence[Sequence[int]]) -> float:
    """Expected tokens of a round that drafts these paths, including the target's own token."""
    shares = (acceptance_DR[range(len(path)), list(path)].prod() for path in paths)
    return 1 + float(sum(shares))


def candidates(acceptance_DR: Tensor, sizes: Sequence[int]) -> list[Shape]:
    """The shapes of depth D or less that may be fastest: chains, and the best static trees with
    these numbers of nodes (as Sequoia fits its trees to the hardware, Chen et al. 2024)."""
    depths = range(1, len(acceptance_DR) + 1)
    trees = {tuple(best_static(acceptance_DR[:d], n).paths) for d in depths for n in sizes}
    chains = [Chain(d) for d in depths]
    trees -= {tuple(map(tuple, paths_of(chain))) for chain in chains}
    return [*chains, *map(Static, sorted(sorted(trees), key=len))]


def fastest_shape(setup: Setup, prompts: Sequence[Sequence[int]], acceptance_DR: Tensor) -> Shape:
    """The static tree or chain of depth D or less that should commit the most tokens per second,
    given acceptance (see `acceptance_by_rank`) and the seconds of whole rounds on `prompts`."""
    shapes = candidates(acceptance_DR, SIZES.get(setup.target.device.type, MORE))
    seconds = rounds_in_turn(setup, prompts, shapes)

    tokens = [expected_static(acceptance_DR, paths_of(shape)) for shape in shapes]
    rates = [n / of_round for n, of_round in zip(tokens, seconds, strict=True)]
    return shapes[rates.index(max(rates))]


def steps_of_a_choice(cfg: DecodeConfig, gamma: int) -> int:
    """An upper bound on the passes, over one prompt at a time, that it takes on a CPU to choose the
    fastest shape of depth γ or less."""
    shapes = gamma * (1 + len(SIZES["cpu"]))
    timed = (1 + OF_ROUNDS) * shapes * min(TIMED, cfg.max_new_tokens)
    return timed + LEARNING * cfg.max_new_tokens


def paths_of(shape: Shape) -> list[list[int]]:
    """The paths of a static tree, or of a chain as a tree with one branch."""
    if isinstance(shape, Static):
        return [list(path) for path in shape.paths]
    return [[0] * (d + 1) for d in range(shape.depth)]

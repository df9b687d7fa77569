"""Chooses the draft topology and length at one temperature. Measurements decide everything that
`DecodeConfig` leaves open, separately at each temperature, since acceptance depends on it: a tree
by the acceptance of each rank and the times of complete steps, a draft length by costs or by a stop
classifier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from specdec.decoding.config import DecodeConfig, is_measured, require_fitting
from specdec.decoding.draft_length import LENGTHS, CostTable, Length, SavedFigures, length
from specdec.decoding.generation import SpeculationStep
from specdec.decoding.way import Way
from specdec.drafters.base import Drafter
from specdec.measure.costs import OF_STEPS, TIMED, cost_table, costs, steps_in_turn
from specdec.measure.setup import Setup
from specdec.sampling.trees import BestFirst, Chain, Dynamic, Shape, Static, best_paths
from specdec.theory.intervals import Interval

T = TypeVar("T")
NODES = 12  # nodes of a tree, unless given
SIZES = {"cpu": (2, 3, 4, 6)}  # nodes of the trees whose speculation steps are timed, by device
MORE = (3, 7, 15, 31, 63)  # on other devices
WIDTH = 6  # children of a node, where the acceptance of each rank is measured
OF_A_CHOICE = 11  # timings behind each cost that a choice depends on
LEARNING = 6  # prompts for choosing a tree or a stop classifier
WEIGHED = 48  # tokens of each response that `Drafter.weigh` learns from


@dataclass(frozen=True)
class FiguresFile:
    """Figures measured for an adaptive draft length, as the JSON file that its setting may name."""

    stem: str
    contents: str
    summary: str  # with {where} in the place of the temperature and the prompts


def file_of(figures: SavedFigures) -> FiguresFile:
    return FiguresFile(figures.stem, figures.document(), figures.summary("{where}"))


@dataclass
class Learned:
    """Measurements made for choices; None for those not needed."""

    paths: list[list[int]] | None = None  # paths of the chosen tree or chain
    acceptance_by_rank: list[list[float]] | None = None  # [K][C], the reason for the choice
    c: Interval | None = None
    v: Interval | None = None
    figures: FiguresFile | None = None


def chosen(
    setup: Setup,
    cfg: DecodeConfig,
    drafter: Drafter,
    temperature: float,
    prompts: Sequence[Sequence[int]],
) -> tuple[Way, Learned]:
    """The decoding configuration for `cfg`, for a drafter at a temperature, and the measurements
    with which its topology and length were chosen. Measurements are taken on the first of
    `prompts`, which should not be those of the evaluation. Raises UserError as `require_fitting`
    does."""
    fastest = cfg.tree == "static" and cfg.paths is None and cfg.nodes is None
    trees = setup.target.reads_trees
    require_fitting(
        replace(cfg, tree=None) if fastest and not trees else cfg, drafter, setup.target
    )
    chains, learning = cfg.chains(drafter, temperature), prompts[:LEARNING]
    assert chains.shape is not None
    gamma = chains.shape.depth
    if drafter.weighs_choices:
        weigh(setup, drafter, chains, learning)
    if cfg.tree == "dynamic":
        return chains.drafting(Dynamic(gamma, cfg.nodes or NODES, cfg.branches)), Learned()
    if cfg.tree == "best_first":
        return chains.drafting(BestFirst(gamma, cfg.nodes or NODES)), Learned()
    if cfg.tree == "static" and cfg.paths:
        return chains.drafting(Static(cfg.paths)), Learned()
    if cfg.tree == "static":
        acceptance_KC = acceptance_by_rank(setup, chains, learning, WIDTH if trees else 1)
        if cfg.nodes is None:
            shape = fastest_shape(setup, chains, learning, acceptance_KC)
        else:
            shape = best_static(acceptance_KC, cfg.nodes)
        learned = Learned(paths_of(shape), acceptance_KC.tolist())
        return chains.drafting(shape), learned
    settings = {"limit": gamma} | dict(cfg.draft_length_settings)
    if cfg.draft_length == "fixed":
        return chains.drafting(Chain(length("fixed", settings).limit)), Learned()
    trials, figures = TrialsOfChains(setup, chains, learning), None
    if is_measured(cfg):
        more, figures = LENGTHS.named(cfg.draft_length).learn(trials, gamma)
        settings |= more
        if figures is not None:
            trials.learned.figures = file_of(figures)
    policy = length(cfg.draft_length, settings, figures)
    return replace(chains, draft_length=policy), trials.learned


@dataclass
class TrialsOfChains:
    """Measurements that an adaptive draft length may request before decoding
    (`draft_length.Trials`)."""

    setup: Setup
    chains: Way
    prompts: Sequence[Sequence[int]]
    learned: Learned = field(default_factory=Learned)

    def step_costs(self) -> tuple[float, float]:
        cost = costs(self.setup, self.chains, self.prompts[0])
        self.learned.c, self.learned.v = cost.c, cost.v
        return cost.c.value, cost.v.value

    def cost_table(self) -> CostTable:
        return cost_table(self.setup, self.chains, self.prompts[0])

    def decode_then(self, policy: Length, outcome: Callable[[], T]) -> T:
        def decoded() -> T:
            self.setup.steps(
                self.prompts, replace(self.chains, draft_length=policy, compiled=False)
            )
            return outcome()

        return self.setup.ranks.first(decoded)


def weigh(setup: Setup, drafter: Drafter, way: Way, prompts: Sequence[Sequence[int]]) -> None:
    """Call `weigh` of a drafter that chooses between ways to draft, on vanilla responses to
    prompts."""

    def cost(member: Drafter, gamma: int) -> tuple[float, float]:
        one_way = Way(member, Chain(gamma), compiled=way.compiled)
        cost = costs(setup, one_way, prompts[0], OF_A_CHOICE)
        return cost.c.value, cost.v.value

    new = min(WEIGHED, setup.max_new_tokens)
    seeds = range(len(prompts))
    responses = setup.ranks.first(
        lambda: setup.responses(prompts, way.plain, max_new_tokens=new, seeds=seeds)
    )
    texts = [[*g.prompt, *g.ids] for g in responses]
    masks = [[False] * len(g.prompt) + [True] * len(g.ids) for g in responses]
    drafter.weigh(cost, texts, masks, way.variant)


def acceptance_by_rank(
    setup: Setup, way: Way, prompts: Sequence[Sequence[int]], width: int = WIDTH
) -> Tensor:
    """Acceptance by depth and rank [K, C], up to the depth of the topology. It is measured with a
    tree in which each node of the first-ranked chain has `width` children: of the speculation steps
    that reached a node of that chain, the share that continued to its child of this rank. Rank r is
    the r-th most likely token if siblings are picked (greedy decoding, or `greedy_draft`), else the
    r-th token drawn."""
    assert way.shape is not None
    depth = way.shape.depth
    paths = [(0,) * d + (rank,) for d in range(depth) for rank in range(width)]  # in node order
    taken, reached = torch.zeros(depth, width), torch.zeros(depth, 1)
    shape = Static(paths) if width > 1 else Chain(depth)
    wide = replace(way, shape=shape, compiled=False)

    def steps(prompt: Sequence[int]) -> list[SpeculationStep]:
        (response,) = setup.responses([prompt], wide, seeds=[0])
        return response.steps

    if setup.brief:
        seeds = [0] * len(prompts)
        together = setup.ranks.first(lambda: setup.responses(prompts, wide, seeds=seeds))
        by_prompt = [response.steps for response in together]
    else:
        by_prompt = setup.ranks.map(prompts, steps)
    for of_prompt in by_prompt:
        for r in of_prompt:
            kept = paths[r.path[-1]] if r.path else ()
            for d in range(min(depth, len(kept) + 1)):
                if any(kept[:d]):
                    break
                reached[d] += 1
                if len(kept) > d:
                    taken[d, kept[d]] += 1
    return taken / reached.clamp_min(1)


def best_static(acceptance_KC: Tensor, nodes: int) -> Static:
    """The static tree with `nodes` nodes and the largest expected accepted length, built from
    `acceptance_by_rank` as in Sequoia (Chen et al. 2024) and Medusa."""
    falling_KC = acceptance_KC.clamp(1e-6, 1).cummin(-1).values
    return Static(best_paths(falling_KC.log().tolist(), nodes))


def expected_static(acceptance_KC: Tensor, paths: Sequence[Sequence[int]]) -> float:
    """Expected tokens of a speculation step that drafts these paths, including the target's own
    token."""
    shares = (acceptance_KC[range(len(path)), list(path)].prod() for path in paths)
    return 1 + float(sum(shares))


def candidates(acceptance_KC: Tensor, sizes: Sequence[int]) -> list[Shape]:
    """The topologies of depth D or less that may be fastest: chains, and the best static trees with
    these numbers of nodes (like Sequoia's hardware-aware trees, Chen et al. 2024)."""
    depths = range(1, len(acceptance_KC) + 1)
    trees = {tuple(best_static(acceptance_KC[:d], n).paths) for d in depths for n in sizes}
    chains = [Chain(d) for d in depths]
    trees -= {tuple(map(tuple, paths_of(chain))) for chain in chains}
    return [*chains, *map(Static, sorted(sorted(trees), key=len))]


def fastest_shape(
    setup: Setup, way: Way, prompts: Sequence[Sequence[int]], acceptance_KC: Tensor
) -> Shape:
    """The static tree or chain of depth D or less that should commit the most tokens per second,
    given acceptance (see `acceptance_by_rank`) and the seconds of complete speculation steps on
    `prompts`; a chain, if the target does not support trees."""
    sizes = SIZES.get(setup.target.device.type, MORE) if setup.target.reads_trees else ()
    shapes = candidates(acceptance_KC, sizes)
    ways = [replace(way, shape=shape, verification="auto") for shape in shapes]
    seconds = steps_in_turn(setup, ways, prompts)

    tokens = [expected_static(acceptance_KC, paths_of(shape)) for shape in shapes]
    rates = [n / of_step for n, of_step in zip(tokens, seconds, strict=True)]
    return shapes[rates.index(max(rates))]


def steps_of_a_choice(cfg: DecodeConfig, gamma: int) -> int:
    """An upper bound on the number of forward passes, over one prompt at a time, for choosing the
    fastest topology of depth γ or less on a CPU."""
    shapes = gamma * (1 + len(SIZES["cpu"]))
    timed = (1 + OF_STEPS) * shapes * min(TIMED, cfg.max_new_tokens)
    return timed + LEARNING * cfg.max_new_tokens


def paths_of(shape: Shape) -> list[list[int]]:
    """The paths of a static tree, or of a chain as a tree with one branch."""
    if isinstance(shape, Static):
        return [list(path) for path in shape.paths]
    return [[0] * (d + 1) for d in range(shape.depth)]

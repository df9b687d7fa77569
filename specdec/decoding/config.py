"""The settings for decoding, and checks that a drafter supports them."""

from dataclasses import dataclass, field
from typing import Any

from specdec.decoding.draft_length import LENGTHS, length
from specdec.decoding.way import Way, fitting_verification, require_draftable, require_read
from specdec.drafters.base import Drafter
from specdec.errors import require, require_between, require_known, require_within
from specdec.files import record
from specdec.sampling.sampler import Sampler, require_cutoffs, require_temperature
from specdec.sampling.trees import DEEPEST, Chain, Static
from specdec.targets.parts import TargetParts
from specdec.theory.intervals import FEWEST

TREES = ("static", "dynamic", "best_first")


@dataclass
class DecodeConfig:
    """The settings for decoding and measuring drafts. Acceptance is counted on all `prompts`.
    Seconds come from the first `timed` of them, on which vanilla and speculative decoding take
    turns, in complete batches. A speedup is computed from both."""

    gamma: int | None = None  # tokens drafted per speculation step of a chain; null: drafter.depth
    prompts: int = 100  # held-out prompts on which acceptance is counted; 0: no measuring
    timed: int = 12  # prompts that are timed, the first ones
    counting: int = 32  # most prompts decoded together where only acceptance is counted
    max_new_tokens: int = 96  # most new tokens per prompt
    # sampling temperatures, each measured separately; 0: greedy
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    top_p: float = 1.0  # probability mass kept of p and q; 1: all
    top_k: int = 0  # the most likely tokens kept of p and q; 0: all
    # verification method with its parameters, as in lenience:factor=0.8; auto: a lossless method
    # that fits the draft topology
    verification: str = "auto"
    greedy_draft: bool = False  # draft the most likely tokens instead of sampling from q
    # dynamic (EAGLE-2), best_first (for parallel heads) or static; null: chains
    tree: str | None = None
    # nodes of a tree; null: 12, or for a static tree those of the topology with the highest
    # expected speed
    nodes: int | None = None
    branches: int = 4  # most children of a node of a dynamic tree
    # all nodes of a static tree; null: those with the highest measured acceptance
    paths: list[list[int]] | None = None
    # besides chains, measure the chain or tree with the highest expected speed, in turn with them;
    # for targets that cannot read trees, a chain
    fastest: bool = False
    # adaptive draft length of chains: optimal, confidence, goodput; fixed: always gamma
    draft_length: str = "fixed"
    # parameters of draft_length; empty: its own defaults
    draft_length_settings: dict[str, Any] = field(default_factory=dict)
    compile: bool = False  # run the target, and the draft if its method can, through torch.compile
    # repetitions of every timed prompt, for steadier seconds; counts come from the first
    repeats: int = 1
    batch: int = 1  # prompts that are timed together
    seed: int = 0  # seed of the sampling

    def __post_init__(self) -> None:
        require_within("decode", self, prompts=0, max_new_tokens=1, repeats=1, batch=1, nodes=1)
        require_within("decode", self, timed=1, counting=1)
        require_within("decode", self, branches=1, gamma=(1, DEEPEST), seed=(0, 2**32 - 1))
        require_known("decode", self, tree=TREES)
        LENGTHS.named(self.draft_length)  # raises for an unknown name
        require(
            self.tree is None or (self.draft_length == "fixed" and not self.draft_length_settings),
            "decode.draft_length and decode.draft_length_settings shorten chains: give "
            "decode.tree=null with them",
        )
        require(
            self.tree is not None or self.nodes is None,
            f"decode.nodes={self.nodes} is the size of a tree, but chains are drafted: give "
            f"decode.tree, one of {', '.join(TREES)}",
        )
        require(
            not self.fastest
            or (
                self.tree is None
                and self.draft_length == "fixed"
                and not self.draft_length_settings
            ),
            "decode.fastest=true compares a shape of its own with chains of γ tokens: leave out "
            "decode.tree, decode.draft_length and decode.draft_length_settings, or give "
            "decode.fastest=false",
        )
        if self.paths is not None:
            require(
                self.tree == "static" and self.nodes is None,
                "decode.paths are all the nodes of a static tree: give decode.tree=static with "
                "them, and no decode.nodes",
            )
            Static(self.paths)  # raises if they do not form a tree
        require_cutoffs("decode", self)
        require(
            0 < len(self.temperatures) == len(set(self.temperatures)),
            f"decode.temperatures={self.temperatures}: give at least one, and each only once",
        )
        for temperature in self.temperatures:
            require_temperature("decode.temperatures", temperature)
            sampler = Sampler(temperature, self.top_k, self.top_p)
            like = Chain(1) if self.tree is None else Static([[0]], fixed=self.tree != "static")
            for shape in (like, Static([[0]])) if self.fastest else (like,):
                fitting_verification(self.verification, shape, sampler, self.greedy_draft)

    @property
    def timed_prompts(self) -> int:
        """The number of prompts to time: whole batches and, of several prompts, at least `FEWEST`,
        since fewer have no interval; all prompts with an adaptive draft length, which depends on
        the batch."""
        batches = max(-(-self.timed // self.batch), FEWEST if self.batch > 1 else 1)
        return (
            self.prompts
            if self.draft_length != "fixed"
            else min(self.prompts, batches * self.batch)
        )

    def chains(self, drafter: Drafter, temperature: float) -> Way:
        """The decoding of chains at a temperature, before another topology or an adaptive draft
        length is chosen (see `measure.choosing`)."""
        return Way(
            drafter,
            Chain(drafter.depth if self.gamma is None else self.gamma),
            sampler=Sampler(temperature, self.top_k, self.top_p),
            verification=self.verification,
            greedy_draft=self.greedy_draft,
            compiled=self.compile,
        )

    def deepest(self, trained: int) -> int:
        """The largest number of tokens drafted in a row by a drafter with this `trained` depth."""
        if self.paths:
            return Static(self.paths).depth
        gamma = trained if self.gamma is None else self.gamma
        return min(gamma, self.draft_length_settings.get("limit") or gamma)

    def shape_in_words(self, trained: int) -> str:
        """A description for the user of the draft topology, for a drafter with this `trained`
        depth."""
        depth = self.deepest(trained)
        if self.tree is not None:
            nodes = len(self.paths) if self.paths else self.nodes
            size = f" of {nodes} nodes" if nodes else ""
            name = self.tree.replace("_", "-")
            return f"{name} trees{size}, at most {depth} {'token' if depth == 1 else 'tokens'} deep"
        chains = f"chains of {depth} {'token' if depth == 1 else 'tokens'}"
        return (
            chains
            if self.draft_length == "fixed"
            else f"{chains} or fewer (draft_length={self.draft_length})"
        )


def is_measured(cfg: DecodeConfig) -> bool:
    """Whether the adaptive draft length needs measured figures that its settings do not give."""
    name = LENGTHS.named(cfg.draft_length).measured
    return bool(name) and cfg.draft_length_settings.get(name) in (None, "")


def beyond_training(cfg: DecodeConfig, drafter: Drafter) -> str:
    """A note for the user if `cfg` drafts deeper than the drafter was trained; empty if not."""
    return drafter.beyond_training(cfg.deepest(drafter.depth), cfg.tree is not None)


def require_fitting(cfg: DecodeConfig, drafter: Drafter, target: TargetParts) -> None:
    """Raise UserError if the drafter, the target or the adaptive draft length does not support
    `cfg`."""
    name, policy = drafter.config.name, LENGTHS.named(cfg.draft_length)
    gamma = drafter.depth if cfg.gamma is None else cfg.gamma
    require_draftable(drafter, Static(cfg.paths).depth if cfg.paths else gamma, policy)
    require_read(target, drafter, cfg.tree is not None, cfg.compile)
    require(
        cfg.tree != "best_first" or drafter.limits.parallel,
        f"decode.tree=best_first needs parallel heads, but {name} drafts one token after another: "
        "give static or dynamic",
    )
    require(
        not drafter.copies or cfg.tree != "static" or cfg.paths is not None,
        f"decode.tree=static: {name} copies tokens, so no tree can be chosen by the acceptance of "
        "each rank: give decode.tree=dynamic, or decode.paths",
    )
    require(
        not drafter.copies or not cfg.fastest,
        f"decode.fastest=true: {name} copies tokens, so no tree can be chosen by the acceptance of "
        "each rank: give decode.fastest=false",
    )
    settings = {"limit": gamma} | dict(cfg.draft_length_settings)
    limit = record(policy, settings, "decode.draft_length_settings").limit
    require_between("decode.draft_length_settings.limit", limit, 1)
    require(
        limit <= gamma,
        f"decode.draft_length_settings.limit={limit} is above γ = {gamma} and would never be "
        f"reached: give decode.gamma={limit}",
    )
    if cfg.tree is None and not is_measured(cfg):
        length(cfg.draft_length, settings)

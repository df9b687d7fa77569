"""The results of an evaluation: dataclasses, written as JSON and read back unchanged.

`evaluate` makes a `Results`; report, W&B, comparison and pipeline read it, and exchange nothing
else. Lists over depths have an entry for each drafted position, from 0.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec.files import read_record, write_json
from specdec.measure.choosing import Learned
from specdec.measure.costs import Costs
from specdec.measure.engine_gain import EngineGain
from specdec.measure.machine import Machine
from specdec.targets.prompt_rendering import DEFAULT_RENDERING, PromptRendering
from specdec.theory.intervals import FEWEST, Interval
from specdec.theory.oracle import Oracle

FILE = "results.json"
CUT_WARNED, CUT_ADVISED = 0.05, 0.3  # shares of cut responses; see `CutResponses`
LEAST_LONGER, MOST_LONGER = 2, 8  # times as long as responses were, advised where many were cut
RIVAL = "rival "  # prefix of a second draft's titles while both are measured
DRAFT, NO_DRAFT, UNCLEAR = VERDICTS = ("draft", "do not draft here", "unclear")  # on a slice
HEADLINE = ("tau", "speedup", "tokens_per_second", "plain_tokens_per_second")


@dataclass(frozen=True)
class Alpha:
    """α by depth in its three variants."""

    sampled: list[Interval]
    greedy_draft: list[Interval]
    greedy: list[Interval]

    def at_temperature(self, temperature: float) -> list[Interval]:
        """The variant for decoding at a temperature, with drafts drawn from q if it is above 0."""
        return self.greedy if temperature == 0 else self.sampled


@dataclass(frozen=True)
class Forced:
    """α by teacher forcing: `all` over every position of the target's own text, each depth given
    the text before it; `visited` at the anchors of the decoder's speculation steps, for each depth
    together with all before it."""

    all: Alpha
    visited: Alpha


@dataclass(frozen=True)
class Lenient:
    """α_l of Leviathan et al., Appendix A.5, with q multiplied by a `factor` l."""

    factor: float
    alpha: Interval  # over all positions
    visited: Interval | None = None  # at the anchors where the decoder's speculation steps started


@dataclass(frozen=True)
class Foreseen:
    """Predictions of the theory that need p and q at every position of the text (T > 0)."""

    divergence: list[Interval]  # D_LK by depth
    lenience: list[Lenient]  # at depth 0
    rejection_tokens: Interval  # E[tokens per pass] of a chain under the method `rejection`
    block_tokens: Interval  # the same under `block`
    non_iterative: Interval | None = None  # α at depth 0 by verification method non_iterative


@dataclass(frozen=True)
class Bin:
    """Drafted tokens of similar confidence: its mean, and the share that was accepted. A token is
    weighted by the probability that all before it were accepted; `weight` is the sum of these
    weights."""

    predicted: float
    observed: Interval
    weight: float


@dataclass(frozen=True)
class Reliability:
    """Confidence and acceptance at one depth. `error` is the expected calibration error: the
    distance between the two in a bin, averaged over tokens (Guo et al. 2017)."""

    whole: Bin
    error: float
    bins: list[Bin]


@dataclass(frozen=True)
class PromptCounts:
    """The counts of one prompt, for comparing two drafts prompt by prompt. `walked` are the tokens
    and the expected number of speculation steps of a decoder along the vanilla response (for
    simulated τ). Figures of teacher forcing are empty for configurations without it."""

    emitted: int
    speculation_steps: int
    positions: list[int] = field(default_factory=list)  # by depth; the lists below are sums of them
    sampled: list[float] = field(default_factory=list)
    greedy: list[float] = field(default_factory=list)
    walked: tuple[float, float] = (0.0, 0.0)
    greedy_draft: list[float] = field(default_factory=list)

    def at_way(self, way: "Described") -> list[float]:
        """Sums by depth of the variant of α that describes acceptance in a decoding
        configuration."""
        if way.temperature == 0:
            return self.greedy
        return self.greedy_draft if way.greedy_draft else self.sampled


@dataclass(frozen=True)
class BatchTimes:
    """The seconds of a timed batch for `tokens` tokens, in vanilla decoding and in a decoding
    configuration, and those of its speculation steps, summed over its rows."""

    prompts: int
    tokens: int
    plain_seconds: float
    seconds: float
    row_steps: int
    speculation_seconds: float


@dataclass(frozen=True)
class Slice:
    """Figures of the prompts that have one `value` of a property (`by`), such as a category, and
    whether drafting pays for them (see `specdec.measure.slices`). Above the τ `break_even`, it
    does. The `verdict` is one of `VERDICTS`, or empty for too few conversations or without an
    interval; it is `corrected` if it also holds after Bonferroni's correction for the number of
    slices. α is at depth 0 over all positions, in the configuration in which it was measured."""

    by: str
    value: str
    prompts: int
    conversations: int
    tau: Interval
    break_even: Interval
    speedup: Interval
    verdict: str = ""
    corrected: bool = False
    timed_speedup: Interval | None = None  # by the clock, if prompts of the slice were timed
    identical: int | None = None  # responses equal to vanilla decoding's, at T = 0
    sampled: Interval | None = None
    greedy: Interval | None = None

    @property
    def name(self) -> str:
        return f"{self.by}: {self.value}"


@dataclass(frozen=True)
class Sample:
    prompt: str  # the user's last turn
    response: str
    tau: float
    earlier: list[tuple[str, str]] = field(default_factory=list)  # the turns before: role, text
    pieces: list[tuple[str, str]] = field(default_factory=list)  # see `specdec.decoding.generation`

    def conversation(self) -> str:
        """The user's last turn, with the turns before it if there are any."""
        turns = [*self.earlier, ("user", self.prompt)]
        return "\n".join(f"{role}: {text}" for role, text in turns) if self.earlier else self.prompt


@dataclass(frozen=True)
class Described:
    """A decoding configuration (`specdec.decoding.way.Way`) in a form for JSON."""

    title: str  # "chains" or "trees", "fastest" for the shape expected to be fastest, or a family
    drafter: str  # the family
    temperature: float
    gamma: int  # the depth of what a speculation step drafts
    nodes: int
    chain: bool  # whether a speculation step drafts a chain rather than a tree
    verification: str
    lossless: bool
    tree: str | None = None  # its kind
    draft_length: str = "fixed"
    top_k: int = 0
    top_p: float = 1.0
    greedy_draft: bool = False
    compiled: bool = False
    asked: str = "auto"  # the verification method that was asked for
    paths: list[list[int]] | None = None  # paths of a static tree
    branches: int | None = None  # children per node of a dynamic tree
    # settings of the adaptive draft length
    draft_length_settings: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> str:
        """The draft topology in words."""
        if self.chain:
            shape = f"chains of γ = {self.gamma}"
        else:
            nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
            shape = f"a {self.tree} tree of {nodes}, depth {self.gamma}"
        return (
            shape
            if self.draft_length == "fixed"
            else f"{shape} at most, length {self.draft_length}"
        )


@dataclass
class Measured:
    """All figures of one decoding configuration. Counts come from all prompts, and seconds from the
    timed ones, in complete batches. If not all prompts were timed, `speedup` and
    `tokens_per_second` combine the tokens that a speculation step adds to a response, over all
    prompts, with the timed seconds of a speculation step and of a vanilla step; `timed_speedup`
    comes from the timed prompts alone."""

    way: Described
    tau: Interval
    speedup: Interval
    timed_speedup: Interval
    tokens_per_second: Interval
    plain_tokens_per_second: Interval
    speculation_steps: int
    drafted_per_step: Interval
    accepted_lengths: list[int]  # speculation steps by the number of tokens they accepted, from 0
    drafted: list[int]  # speculation steps that drafted a token at each depth
    accepted: list[int]  # speculation steps that accepted it
    repetition: Interval  # share of 4-grams that occurred earlier in the same response
    costs: Costs
    forced: Forced | None = None  # by teacher forcing, for the first way alone
    reached: list[Interval] = field(default_factory=list)  # by depth: accepted / speculation steps
    conditional_acceptance: list[Interval] = field(default_factory=list)  # given all before it
    identical: int | None = None  # responses equal to vanilla decoding's, at T = 0
    learned: Learned = field(default_factory=Learned)
    operations: float | None = None  # ĉ: the draft's operations per token over the target's
    foreseen: Foreseen | None = None
    oracle: Oracle | None = None
    confidence: list[Reliability] = field(default_factory=list)  # by depth, as the draft sees it
    calibrated: list[Reliability] = field(default_factory=list)  # the same, calibrated
    seconds_spent: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    prompts: list[PromptCounts] = field(default_factory=list)
    # times of the timed prompts, which are the first ones
    times: list[BatchTimes] = field(default_factory=list)
    slices: dict[str, Slice] = field(default_factory=dict)  # by name
    fastest: bool = False  # whether the shape expected to be fastest is this one

    @property
    def alpha(self) -> Forced:
        """α by teacher forcing, from the configuration in which it was measured."""
        if self.forced is None:
            raise ValueError(f"α was not measured for {self.way.title}, only for the first way")
        return self.forced


@dataclass
class ByDepth:
    """α at each depth, over all positions, in its three variants."""

    sampled: list[float]
    greedy_draft: list[float]
    greedy: list[float]


@dataclass
class HeldOut:
    """Held-out figures by teacher forcing. `tau_*`: simulated τ of chains of `gamma` tokens over
    the texts (0: as many as the draft was trained for); `alpha_*`: α at depth 0 over all positions;
    `positions`: their number by depth."""

    tau_greedy: float
    tau_sampled: float
    alpha_sampled: float
    alpha_greedy: float
    by_depth: ByDepth
    positions: list[int]
    gamma: int = 0


@dataclass
class Curve:
    """The course of a training run, by step."""

    steps: list[int]
    loss: list[float]  # at depth 0
    sampled: list[list[float]]  # α by step and depth; no depths in training on text alone
    held_out_steps: list[int]
    held_out_sampled: list[list[float]]


@dataclass(frozen=True)
class CutResponses:
    """The number of the target's responses, used for training and selecting a draft, that were cut
    at `responses.max_new_tokens` before the target had ended them."""

    responses: int
    cut: int
    max_new_tokens: int
    room: int | None = None  # the most tokens that the target has room for; None: no limit
    sampling: str = ""  # a description of the sampling

    @property
    def share(self) -> float:
        return self.cut / self.responses if self.responses else 0.0

    @property
    def warns(self) -> bool:
        return self.share > CUT_WARNED

    @property
    def enough(self) -> int | None:
        """A limit at which about `CUT_WARNED` of the responses would be cut, if every further
        `max_new_tokens` tokens end the same share of the remaining ones: 2 to 8 times as many, as
        far as the target has room. None if no more are needed, or there is no room."""
        if not self.warns:
            return None
        times = math.log(CUT_WARNED) / math.log(self.share) if self.share < 1 else math.inf
        wanted = math.ceil(self.max_new_tokens * min(MOST_LONGER, max(LEAST_LONGER, times)))
        wanted = -(-wanted // 64) * 64 if wanted > 64 else wanted
        wanted = wanted if self.room is None else min(wanted, self.room)
        return wanted if wanted > self.max_new_tokens else None

    def __str__(self) -> str:
        """The count, with a warning above `CUT_WARNED` and advice above `CUT_ADVISED`."""
        said = (
            f"{self.cut:,} of {self.responses:,} responses ({self.share:.0%}) were cut at "
            f"responses.max_new_tokens={self.max_new_tokens}"
        )
        if not self.warns:
            return f"{said}."
        said = f"Warning: {said}: the draft does not learn how longer responses go on or end."
        if self.share <= CUT_ADVISED:
            return said
        if (enough := self.enough) is None:
            return f"{said} The target has no room for longer ones: lower data.max_prompt."
        return (
            f"{said} Raise responses.max_new_tokens to about {enough}, up to what you serve, and "
            f"data.max_length by {enough - self.max_new_tokens} if you set it."
        )


@dataclass
class Training:
    """The outcome of training; `held_out` belongs to the best checkpoint."""

    step: int
    steps: int
    tokens: int
    seconds: float
    objective: float
    held_out: HeldOut
    stopped_early: bool = False
    curve: Curve | None = None
    trained_on: str = ""  # the terms of the loss and their weights
    # documents of the validation part, on which the checkpoint was selected; 0: it was selected on
    # the held-out conversations that are reported
    validation: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Shift:
    """The distance of a target that was trained with its draft from the original, over the
    original's greedy responses: KL(original ‖ adapted) in nats a token at T = 1, and the share of
    unchanged responses."""

    original: str
    kl: Interval
    same: Interval


@dataclass
class Results:
    """A draft measured on some prompts. `measured` has an entry for each decoding configuration and
    each temperature, all temperatures of one configuration in a row. The first configuration is the
    requested one; the others took turns with it."""

    name: str  # name of the run
    drafter: str  # the family
    target: str
    data: str
    prompts: int
    batch: int
    max_new_tokens: int
    machine: Machine
    measured: list[Measured]
    processes: int = 1  # number of processes that measured
    timed: int = 0  # number of timed prompts, which are the first ones; 0: all
    counting: int = 1  # number of other prompts decoded together
    origin: str = "held-out prompts"  # a description of the prompts
    prompt_keys: list[str] = field(default_factory=list)  # hashes of their ids, in order
    # the number of each prompt's conversation, from 0; empty: each prompt is its own
    conversations: list[int] = field(default_factory=list)
    target_fingerprint: str = ""  # fingerprint of the decoding target; empty: unknown
    learned_on: str = ""
    calibrated_on: int = 0  # number of other prompts in the draft's calibration
    target_operations: int = 0  # operations of a vanilla step; 0 if they cannot be counted
    weight_bytes: int = 0  # the size of the target's weights, which a pass reads
    draft: str = ""  # its folder, quoted for use in a command; empty if unknown
    combined: str = ""  # the same for the second draft: its folder, or the first's with options
    training: Training | None = None
    cut: CutResponses | None = None  # None: the target wrote no responses to train on
    shift: Shift | None = None  # shift of the target, if it was trained too
    in_engine: EngineGain | None = None  # if the draft was also measured in an engine
    # for each layout in which this draft cannot be exported although its method can, the reason
    rejected_layouts: dict[str, str] = field(default_factory=dict)
    # how the prompts were rendered, beyond the target's own files
    rendering: PromptRendering = DEFAULT_RENDERING

    @property
    def ways(self) -> dict[str, list[Measured]]:
        """The entries of each decoding configuration, by its title."""
        by_title: dict[str, list[Measured]] = {}
        for one in self.measured:
            by_title.setdefault(one.way.title, []).append(one)
        return by_title

    @property
    def asked(self) -> list[Measured]:
        """The results of the requested decoding configuration, one for each temperature."""
        return next(iter(self.ways.values()))

    @property
    def others(self) -> dict[str, list[Measured]]:
        """The entries of the other decoding configurations, by title."""
        return dict([*self.ways.items()][1:])

    @property
    def timed_prompts(self) -> int:
        return self.timed or self.prompts

    @property
    def without_interval(self) -> str:
        """The reason why τ has no interval; empty if `FEWEST` prompts or more were measured."""
        prompts = "1 prompt" if self.prompts == 1 else f"{self.prompts} prompts"
        return "" if self.prompts >= FEWEST else f"measured on {prompts}: no interval"

    @property
    def times_without_interval(self) -> str:
        """The reason why speedups and tokens/s, which come from complete batches, have no interval;
        else empty."""
        timed = self.timed_prompts
        batches = -(-timed // self.batch)
        if self.prompts >= FEWEST and batches < FEWEST:
            prompts = "1 prompt" if timed == 1 else f"{timed} prompts"
            if self.batch > 1:
                prompts = f"{batches} batch{'es' * (batches > 1)} of {self.batch} prompts"
            return f"timed on {prompts}: no interval"
        return self.without_interval

    def headline(self) -> dict[str, float]:
        """The figures for comparing runs, each under one flat name."""
        out: dict[str, float] = {}
        if self.shift is not None:
            out |= {"shift/kl": self.shift.kl.value, "shift/same": self.shift.same.value}
        first = self.asked[0].way.title
        for one in self.measured:
            figures = {name: getattr(one, name) for name in HEADLINE}
            figures |= {"c": one.costs.c, "v": one.costs.v}
            for variant, by_depth in vars(one.forced.all).items() if one.forced else ():
                figures |= {f"alpha_{variant}/{k}": x for k, x in enumerate(by_depth)}
            for name in ("confidence", "calibrated"):
                errors = enumerate(getattr(one, name))
                figures |= {f"error_{name}/{k}": x for k, x in errors}
            where = f"T{one.way.temperature:g}"
            where = where if one.way.title == first else f"{one.way.title}/{where}"
            for name, x in figures.items():
                out[f"{where}/{name}"] = x.error if isinstance(x, Reliability) else x.value
        return out

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Results":
        """The results in a report's folder. Raises UserError for a missing or damaged file."""
        remedy = "evaluate the draft again"
        return read_record(cls, folder / FILE, remedy, upgraded=_without_early_slices)


def _without_early_slices(results: Any) -> Any:
    """A file's results without the slices of versions before `Slice.break_even`, whose figures have
    no verdict. A new report lacks them; all other figures are the same."""
    listed = results.get("measured") if isinstance(results, dict) else None
    for one in listed if isinstance(listed, list) else ():
        slices = one.get("slices") if isinstance(one, dict) else None
        if isinstance(slices, dict):
            early = [k for k, x in slices.items() if isinstance(x, dict) and "break_even" not in x]
            for name in early:
                del slices[name]
    return results


def split_rival(both: Results, drafter: str) -> tuple[Results, Results]:
    """The results of two drafts measured in turn, separated; `drafter` is the second one's
    method."""
    ours = [x for x in both.measured if not x.way.title.startswith(RIVAL)]
    theirs = [
        replace(x, way=replace(x.way, title=x.way.title.removeprefix(RIVAL)))
        for x in both.measured
        if x.way.title.startswith(RIVAL)
    ]
    return replace(both, measured=ours), replace(both, drafter=drafter, measured=theirs)

"""The drafter interface: one class per family, used by training and by decoding alike.

Letters: B batch, A anchors, k depth, K number of depths, D width, S draft vocabulary, W nodes that
grow at once.

The alignment rule: a drafter reads tokens up to and including the anchor a, and the target's
features strictly before it. Depth k predicts token a + 1 + k, whose target distribution is
`target_logits[a + k]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from specdec.compat import set_buffer
from specdec.context import Context, Known, Moment, Needs, Proposal
from specdec.errors import UserError, require, require_between, require_known, require_within
from specdec.sampling.choose import Choose
from specdec.sampling.confidence import Calibrations, variant_of
from specdec.sampling.trees import DEEPEST, Growth, Shape
from specdec.targets.base import Target
from specdec.targets.parts import Parts


@dataclass
class AnchorsConfig:
    """Which anchors are trained on: `per_row` of each packed row, drawn anew at every step; null
    takes all. A sample is for families whose training pass costs more with every anchor."""

    per_row: int | None = None

    def __post_init__(self) -> None:
        require_between("drafter.anchors.per_row", self.per_row, 1)

    def draw(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """The weight of each depth at each position [T, K]. Drawn anchors weigh more, so that the
        expected loss and its gradient are those of all valid anchors."""
        weight_TK = valid_TK.float()
        usable = valid_TK[:, 0].nonzero()[:, 0]
        if self.per_row is None or len(usable) <= self.per_row:
            return weight_TK
        order = torch.randperm(len(usable), generator=generator)[: self.per_row]
        drawn_T1 = torch.zeros_like(weight_TK[:, :1])
        drawn_T1[usable[order]] = len(usable) / self.per_row
        return weight_TK * drawn_T1


@dataclass(kw_only=True)
class Sizes:
    """The sizes of a drafter that the target determines; families that need more extend the class.

    `target_vocab` and `draft_vocab` count tokens; a `draft_vocab` of None is the whole vocabulary.
    The sizes are written to a draft's card with the config, so all fields are plain JSON.
    """

    target_vocab: int
    draft_vocab: int | None = None


class Drafter(nn.Module, ABC):
    """Proposes tokens. A family gives `hidden` and `unembed`; the rest has defaults.

    A drafter is made from its config (the user's choices) and its sizes (what the target
    determines), so a draft on disk can be read without planning it again. Frozen parts that belong
    to the target (its embedding) are attached and never saved.
    """

    Config: ClassVar[type[Any]]  # the dataclass that configures the family
    Sizes: ClassVar[type[Sizes]] = Sizes
    bounds: ClassVar[Mapping[str, int | tuple[int, int]]] = {}  # of settings; see `require_within`
    starts: ClassVar[Sequence[str]] = ("target", "random")  # values of the setting `start`
    trainable: ClassVar[bool] = True  # see `trains`
    reads_body: ClassVar[bool] = False  # runs the target's own layers, so it needs a whole target
    needs: Needs = Needs()
    depth: int  # how many depths are trained and measured; also the default γ
    parallel: bool = False  # depths do not read each other's tokens: `Growth.marginals`
    max_depth: int | None = None  # parallel heads cannot draft more than they have
    in_transformers: ClassVar[str | None] = None  # benches: its name in transformers' generate
    long_prompts: ClassVar[Mapping[str, Any]] = {}  # configs to measure on long prompts
    copies: bool = False  # drafts tokens that it finds, which have no q and no second-best token
    chooses: ClassVar[bool] = False  # chooses what to draft by what `weigh` has learned
    positions: int | None = None  # the longest text to draft for, in tokens; None: any
    scratch: int = 0  # slots of a cache that drafting needs besides those of its nodes
    noted_alpha: Sequence[float] = ()  # greedy α by depth on held-out text, if read from disk
    calibrations = Calibrations()  # of the confidence in its drafts
    regressed: int = 2  # how many depths a start by regression is solved for
    learning_rates: Mapping[str, float] = {}  # factors of `optim.lr`, by pattern of weight names
    added: str | tuple[str, ...] = ()  # prefixes of tensors that an earlier draft may lack
    vocab_S: Tensor | None  # target ids of the draft vocabulary, ascending; None = all

    def __init__(self, config: Any, sizes: Any) -> None:
        super().__init__()
        bounds = {"depth": (1, DEEPEST), "draft_vocab": 1, "intermediate_size": 1, **self.bounds}
        given = {name: bound for name, bound in bounds.items() if hasattr(config, name)}
        require_within("drafter", config, **given)
        if hasattr(config, "start"):
            require_known("drafter", config, start=self.starts)
        self.config = config
        self.sizes = sizes
        self.depth = config.depth
        self.register_buffer("vocab_S", None)
        if sizes.draft_vocab:
            self.vocab_S = torch.arange(sizes.draft_vocab)

    @classmethod
    def trains(cls, config: Any) -> bool:
        """Whether a drafter with this config has weights to train."""
        return cls.trainable

    def beyond_training(self, depth: int, tree: bool) -> str:
        """What to tell the user if chains or trees of this depth are deeper than the drafter was
        trained for; empty if they are not, or cannot be drafted at all. A language model of its own
        has no such depth: only what reads the target's features drafts further from its own states
        in place of them."""
        fed_back = self.trains(self.config) and self.needs != Needs()
        if depth <= self.depth or self.max_depth is not None or not fed_back:
            return ""
        return (
            f"this {self.config.name} was trained to draft {self.depth} tokens in a row but drafts "
            f"{depth} here: the further ones take as long, and fewer of them will be accepted"
        )

    @classmethod
    def learning_rate(cls, config: Any) -> float:
        """The learning rate if `optim.lr` is null. Higher ones spoil a start by regression."""
        return 3e-4 if getattr(config, "start", None) == "regression" else 1e-3

    @classmethod
    def upgraded(cls, config: Any) -> Any:
        """A config from a file of any version, brought up to date. If `start` is missing, that
        version had only one start, which is now the second of `starts`. Anything that is not a dict
        is returned unchanged."""
        if isinstance(config, dict) and hasattr(cls.Config, "start"):
            return {"start": cls.starts[1]} | config
        return config

    @classmethod
    def adapts_target(cls, config: Any) -> bool:
        """Whether a drafter with this config trains adapters on the target along with itself. The
        target with these adapters is then the one that it drafts for."""
        return False

    @classmethod
    def plan(cls, config: Any, target: Parts) -> Any:
        """The `Sizes` of a drafter with this config for this target."""
        return cls.sized(config, target)

    @classmethod
    def sized(cls, config: Any, target: Parts, **more: Any) -> Any:
        """The family's `Sizes`, with the values `more` of its own fields. `draft_vocab` is None
        unless it is smaller than the target's vocabulary."""
        V, given = target.vocab_size, getattr(config, "draft_vocab", None)
        more.setdefault("draft_vocab", given if (given or V) < V else None)
        return cls.Sizes(target_vocab=V, **more)

    @classmethod
    def build(
        cls,
        config: Any,
        target: Parts,
        vocab_S: Tensor | None = None,
        earlier: "Drafter | None" = None,
    ) -> Self:
        """A drafter to train for a target. Its weights start as the config says, or as those of
        an `earlier` draft (see `inherit`).

        `vocab_S` holds the target ids of a pruned draft vocabulary, ascending (as
        `specdec.drafters.frequent_tokens` gives them); without it, the lowest ids are kept.
        """
        drafter = cls(config, cls.plan(config, target))
        if drafter.vocab_S is not None and vocab_S is not None:
            drafter.vocab_S = vocab_S
        drafter.to(target.device)
        drafter.attach(target)
        with torch.no_grad():
            drafter.start(target)
            if earlier is not None:
                drafter.inherit(earlier)
        drafter.begin_training(inherited=earlier is not None)
        return drafter

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast as modules do, but never cast rotary frequencies: rounded to bfloat16, they
        would be off by up to 0.4 %, which adds up to one radian after 256 positions."""
        exact = {name: x for name, x in self.named_buffers() if name.endswith("inv_freq")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, x in exact.items():
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            set_buffer(module, leaf, x.to(self.get_buffer(name).device))
        return self

    def start(self, target: Parts) -> None:
        """Set the weights that training starts from."""

    def inherit(self, earlier: "Drafter") -> None:
        """Take over the weights of an earlier draft, whose vocabulary must be part of this draft's.
        Rows over the draft vocabulary are matched by token id; rows of tokens that the earlier
        draft lacks keep their start. Raises UserError for a tensor that does not fit."""
        theirs, place_S = earlier.state_dict(), None
        if self.vocab_S is not None and earlier.vocab_S is not None:
            known_S = earlier.vocab_S.to(self.vocab_S.device)
            require(
                bool(torch.isin(known_S, self.vocab_S).all()),
                "the earlier draft has tokens that this one lacks: add them to vocab_S",
            )
            place_S = torch.searchsorted(self.vocab_S, known_S)
        for name, x in self.state_dict().items():
            if name == "vocab_S" or (name not in theirs and name.startswith(self.added)):
                continue
            found = theirs.get(name, torch.empty(0))
            over_vocab = self.vocab_S is not None and x.shape[:1] == self.vocab_S.shape
            if found.shape == x.shape:
                x.copy_(found)
            elif place_S is not None and over_vocab and found.shape == x[place_S].shape:
                x[place_S] = found.to(x)
            else:
                said = f"of shape {list(found.shape)}" if name in theirs else "missing"
                raise UserError(
                    f"the earlier draft's tensor {name!r} is {said}, but {list(x.shape)} is needed"
                    ": give the settings of that draft"
                )

    def begin_training(self, inherited: bool) -> None:
        """Add parts that only training needs (adapters) to fresh weights, or to those `inherited`
        from a draft that is trained further."""

    def finished(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of a state dict that is saved: all but the additions of `begin_training`."""
        return dict(weights)

    def fit(self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> None:
        """Learn from training texts without gradients and store the result (counts, an index) in
        buffers. `masks` mark the assistant's tokens."""

    @property
    def regresses(self) -> bool:
        """Whether training starts from weights that `regress` solves for."""
        return getattr(self.config, "start", None) == "regression"

    def regress(self, known: Callable[[], Iterable[Known]]) -> None:
        """Solve in closed form for the weights that training starts from. `known()` yields the same
        part of the training texts every time. Called only if the drafter `regresses`."""

    def require_sound(self) -> None:
        """Raise UserError if loaded buffers hold values that no fit can have produced, such as
        ids outside the target's vocabulary."""
        if (ids_S := self.vocab_S) is not None:
            rising = bool((ids_S[1:] > ids_S[:-1]).all() and ids_S[0] >= 0)
            require(
                rising and int(ids_S[-1]) < self.target_vocab,
                f"the ids of the draft vocabulary must rise within 0 to {self.target_vocab - 1}",
            )

    def attach(self, target: Parts) -> None:
        """Keep references to the frozen parts of the target that the drafter reads."""

    def adapted(self, ctx: Context, progress: float) -> tuple[Tensor, float] | None:
        """If the target is adapted: its final hidden states [B, T, D] with the current adapters,
        and the weight of the draft's own loss when the share `progress` of a run is done. The
        divergence of the adapted target from the original is added with weight 1."""
        return None

    def settled(self, target: Target) -> "tuple[Drafter, Target]":
        """The drafter and the target to decode with, not yet attached: these two or, if the target
        was adapted, a drafter without adapters and a copy of the target with them merged."""
        return self, target

    @property
    def target_vocab(self) -> int:
        return self.sizes.target_vocab

    @property
    def train_depth(self) -> int:
        """How many depths the loss covers: `depth`, or fewer if the family trains on fewer."""
        return self.depth

    def anchors(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """The weight in the loss of each depth at each position of a row [T, K]; a position
        without weight is not an anchor. By default every valid depth weighs 1. If the config has
        `anchors`, a sample of the anchors is drawn, each of which weighs 1 / its probability, so
        that the expected loss is that of all anchors.

        `valid_TK` marks the depths that predict a token that counts. Both tensors are on the CPU.
        """
        return getattr(self.config, "anchors", AnchorsConfig()).draw(valid_TK, generator)

    def features_of(self, ctx: Context) -> Tensor:
        """The target's features that the drafter reads [B, T, F]: layers, or the final state."""
        features = ctx.layers_BTF if self.needs.layers else ctx.final_BTD
        assert features is not None
        return features

    @abstractmethod
    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        """Hidden states [B, A, K, D] of every depth at every anchor.

        `drafted_BAk` holds the k = K - 1 tokens drafted so far after each anchor. None means the
        text's own next tokens (teacher forcing), with K = `depth`.
        """

    def training_hidden(self, ctx: Context, anchors_BA: Tensor, moment: Moment) -> Tensor:
        """The forward pass of training: hidden states [B, A, K, D] at `train_depth` depths or
        more. Families that do not train as they draft (noise on features, glancing, parallel
        depths) replace this default."""
        return self.hidden(ctx, anchors_BA, None)

    @abstractmethod
    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """Draft logits [..., S] of depth k from hidden states [..., D]."""

    def unembed_all(self, hidden_NKD: Tensor) -> Tensor:
        """Draft logits [N, K, S] of all depths."""
        depths = range(hidden_NKD.shape[1])
        return torch.stack([self.unembed(hidden_NKD[:, k], k) for k in depths], 1)

    def confidence(self, hidden_NKD: Tensor) -> Tensor | None:
        """The family's own estimate of α [N, K] at each depth, if it makes one. It is trained along
        with the draft, whatever the draft's own loss (see `Objective.loss`)."""
        return None

    def weigh(
        self,
        cost: Callable[["Drafter", int], tuple[float, float]],
        texts: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool]],
        variant: str,
    ) -> None:
        """Learn what the choice of a draft depends on; called for families with `chooses` before
        decoding at a temperature. `cost(member, γ)` measures the time of one draft step of a
        member that drafts γ tokens, and of a pass over γ + 1 tokens, both in plain steps. Where
        `masks` is true, the tokens of `texts` are the target's own answers at that temperature.
        `variant` is that of α (see `variant_of`)."""

    def new_cache(self, capacity: int | None = None) -> Any:
        """A cache that drafting keeps between the rounds of one generation, with a `select(rows)`
        method, or None. `capacity` fixes the slots of families whose passes can be compiled."""
        return None

    @torch.no_grad()
    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        """Draft in the given shape after each row's anchor, the last token of the row in `ctx`.

        `ctx` is always the whole context: a cache only saves work and never changes the draft.
        Families that copy tokens replace this method.
        """
        growth = self.begin(ctx, cache)
        variant = variant_of(choose.sampler.greedy, choose.siblings == "fixed")
        growth.calibration = self.calibrations.of(variant)
        proposal = shape.draft(growth, choose)
        if ctx.cache is not None:
            ctx.cache.drop()  # drafts in the target's own slots, which its pass will overwrite
        q_BNS = proposal.q_BNV
        if q_BNS is not None and q_BNS.shape[-1] < self.target_vocab:
            assert self.vocab_S is not None
            q_BNV = q_BNS.new_zeros(*q_BNS.shape[:2], self.target_vocab)
            proposal.q_BNV = q_BNV.index_copy_(-1, self.vocab_S, q_BNS)
        return proposal

    def hear(self, logits_BXV: Tensor, cache: Any) -> None:
        """Take the target's logits after each scout of the last proposal; `cache` is the one used
        for that draft. Called only for families that send scouts, which learn from these logits."""

    def begin(self, ctx: Context, cache: Any = None) -> Growth:
        """The state of one round at its anchors. This default reads every node's path again from
        the start; overrides that use a cache must give the same logits."""
        anchor_B1 = torch.tensor(ctx.counts(), device=ctx.ids_BT.device)[:, None] - 1
        paths: list[list[list[int]]] = [[[]] for _ in ctx.counts()]  # by place: the anchor's first

        def logits(W: int) -> Tensor:
            last = [known[-W:] for known in paths]
            drafted_BWk = torch.tensor(last, dtype=torch.long, device=anchor_B1.device)
            k = drafted_BWk.shape[2]
            hidden = self.hidden(ctx, anchor_B1.expand(-1, W), drafted_BWk)
            return self.unembed(hidden[:, :, k], k)

        def grow(tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
            above = [[-1]] * len(paths) if parents_BW is None else (parents_BW + 1).tolist()
            for known, places, tokens in zip(paths, above, tokens_BW.tolist(), strict=True):
                known += [[*known[at], token] for at, token in zip(places, tokens, strict=True)]
            return logits(tokens_BW.shape[1])

        return Growth(logits(1)[:, 0], grow)


def chosen_layers(given: Sequence[int] | None, default: Sequence[int], target: Parts) -> list[int]:
    """The target's layers that a drafter reads: those that its config gives, or the default.
    Raises UserError for a layer that the target lacks."""
    layers, L = given or sorted(set(default)), target.config.num_hidden_layers
    few = "" if given else "; the default needs more, so give drafter.layers"
    require(
        all(0 < k <= L for k in layers),
        f"drafter.layers={list(layers)}: layers of this target run from 1 to {L}{few}",
    )
    return list(layers)


def require_rising(layers: Sequence[int] | None) -> None:
    """Raise UserError unless layers to read are unset, or distinct and in rising order."""
    require(
        layers is None or (len(layers) > 0 and all(a < b for a, b in pairwise(layers))),
        f"drafter.layers={layers}: give distinct layers in rising order, as engines "
        "read them, or null for the default",
    )


def copied_chains(found: list[list[int]], ctx: Context) -> Proposal:
    """A proposal of the tokens found for each row, padded to the longest row."""
    longest = max(map(len, found))
    padded = [ids + [-1] * (longest - len(ids)) for ids in found]
    return Proposal(torch.tensor(padded, dtype=torch.long, device=ctx.ids_BT.device))


def one_hot(hidden: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V] for ids [..., 1]: 0 at the id and -inf elsewhere; all -inf for id -1."""
    token = hidden.long()
    logits = hidden.new_full((*token.shape[:-1], vocab_size), -torch.inf)
    value = torch.zeros_like(hidden).masked_fill(token < 0, -torch.inf)
    return logits.scatter(-1, token.clamp_min(0), value)

"""The base classes of drafters: `Drafter`, the interface of every drafter; `Predictor`, for
drafters with a distribution q of their own at every depth; and `Trainable`, for drafters with
weights to train.

An optional ability is a class attribute, False by default. A drafter that sets it must implement
the methods named beside it. The functions at the end make the `Growth` of each kind of drafter,
which extends a draft tree node by node.

The alignment rule: a drafter reads tokens up to and including the anchor a, and the target's hidden
states strictly before it. Depth k predicts token a + 1 + k, whose target distribution is
`target_logits[a + k]`.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from specdec.compat import set_buffer
from specdec.context import Context, HiddenStateSpec, KnownAnchors, Proposal, TrainingMoment
from specdec.drafters.attention import pieces, unread
from specdec.errors import UserError, require, require_between, require_known, require_within
from specdec.runtime.cache import SlotCache
from specdec.sampling.choose import Choose
from specdec.sampling.confidence import Calibrations, variant_of
from specdec.sampling.trees import DEEPEST, Growth, Shape
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target

NOTHING, OWN = -1, -2  # in place of a copied id (see `Drafter.copied`)


@dataclass(kw_only=True)
class Sizes:
    """The sizes of a drafter that depend on the target; methods that need more extend the class.

    `target_vocab` and `draft_vocab` are numbers of tokens; a `draft_vocab` of None is the whole
    vocabulary. The sizes are written to a draft's card with the config, so all fields are plain
    JSON.
    """

    target_vocab: int
    draft_vocab: int | None = None

    @classmethod
    def of_config(cls, config: Any, target: TargetParts, **more: Any) -> Self:
        """The sizes for this config and target, with the values `more` of a method's own fields.
        `draft_vocab` is None unless it is smaller than the target's vocabulary."""
        V, asked = target.vocab_size, getattr(config, "draft_vocab", None)
        more.setdefault("draft_vocab", asked if (asked or V) < V else None)
        return cls(target_vocab=V, **more)


@dataclass
class Limits:
    """The limits of a drafter that decoding must respect."""

    depth: int | None = None  # the most tokens in a row that it can draft; None: any number
    positions: int | None = None  # the longest text to draft for, in tokens; None: any
    slots: int = 0  # slots of a cache that drafting needs besides those of its nodes
    parallel: bool = False  # depths do not read each other's tokens: `Growth.marginals`


class Drafter(nn.Module, ABC):
    """Proposes tokens. A drafter is built from its config (the user's choices) and its sizes (which
    depend on the target), so a draft on disk is loaded without calling `plan` again.

    `Config` is the dataclass that configures the method. It may have `bounds`, the limits of its
    settings (see `require_within`), and `initialisations`, the possible values of its setting
    `initialisation`.

    Each attribute that is False by default declares an ability. A drafter that sets it implements
    the methods named beside it.
    """

    Config: ClassVar[type[Any]]
    Sizes: ClassVar[type[Sizes]] = Sizes
    config: Any
    sizes: Any
    needs: HiddenStateSpec = HiddenStateSpec()
    depth: int  # number of trained and measured depths; also the default γ
    limits: Limits

    copies: bool = False  # its proposals are point masses, without q: `copied`
    fits_texts: ClassVar[bool] = False  # learns counts or an index from texts: `fit`
    weighs_choices: ClassVar[bool] = False  # chooses between ways to draft by their cost: `weigh`
    sends_scouts: ClassVar[bool] = False  # its proposals have scouts (see `Scouts`): `hear`
    runs_target: ClassVar[bool] = False  # may run the target's own layers, even in training
    calibrations = Calibrations()  # calibrations of its confidence
    noted_alpha: Sequence[float] = ()  # its greedy α by depth on held-out text, as noted on disk
    # the files that it, or the draft that it was trained from, was imported from
    # (specdec/formats/import_layout.py); None: it is no import
    origin: Any = None
    # the same way to draft in `generate` of transformers: "assistant" or "prompt lookup"
    in_transformers: ClassVar[str | None] = None
    # configs, by name, of a family that pays only where prompts are long; benches measure these
    long_prompts: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: Any, sizes: Any) -> None:
        super().__init__()
        bounds: dict[str, Any] = {"depth": (1, DEEPEST), "draft_vocab": 1, "intermediate_size": 1}
        bounds |= {"window": 1, "sink_tokens": 0} | getattr(config, "bounds", {})
        own = {name: bound for name, bound in bounds.items() if hasattr(config, name)}
        require_within("drafter", config, **own)
        if hasattr(config, "initialisation"):
            require_known("drafter", config, initialisation=initialisations_of(config))
        self.config = config
        self.sizes = sizes
        self.depth = config.depth
        self.limits = Limits()

    @classmethod
    def trains(cls, config: Any) -> bool:
        """Whether a drafter with this config has weights to train."""
        return False

    @classmethod
    def adapts_target(cls, config: Any) -> bool:
        """Whether a drafter with this config also trains adapters on the target. It then drafts for
        the target with these adapters."""
        return False

    @classmethod
    def plan(cls, config: Any, target: TargetParts) -> Any:
        """The `Sizes` of a drafter with this config for this target."""
        return cls.Sizes.of_config(config, target)

    @classmethod
    def build(
        cls,
        config: Any,
        target: TargetParts,
        vocab_S: Tensor | None = None,
        earlier: "Drafter | None" = None,
    ) -> Self:
        """A drafter for a target. Trained methods start from the weights of an `earlier` draft, if
        there is one, and may have the pruned draft vocabulary `vocab_S`."""
        drafter = cls(config, cls.plan(config, target))
        drafter.to(target.device)
        drafter.attach(target)
        return drafter

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast like any module, but never cast rotary frequencies: rounded to bfloat16,
        they would be off by up to 0.4 %, or one radian after 256 positions."""
        exact = {name: x for name, x in self.named_buffers() if name.endswith("inv_freq")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, x in exact.items():
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            set_buffer(module, leaf, x.to(self.get_buffer(name).device))
        return self

    def attach(self, target: TargetParts) -> None:
        """Keep references to the frozen parts of the target that the drafter reads. They are never
        saved."""

    def new_cache(self, capacity: int | None = None) -> Any:
        """A cache that drafting keeps between the speculation steps of one generation, with a
        `select(rows)` method, or None. `capacity` fixes the number of slots for methods whose
        forward passes can be compiled."""
        return None

    @abstractmethod
    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        """Draft a chain or tree of the given shape after each row's anchor, the last token of the
        row in `ctx`.

        `ctx` is always the complete context: a cache only saves work and never changes the draft.
        """

    @abstractmethod
    def draft_growth(self, ctx: Context, cache: Any = None) -> Growth:
        """The drafting state of one speculation step at its anchors. Beam search, which chooses
        tokens itself, extends the draft from it node by node."""

    def copied(self, ctx: Context, anchors_BA: Tensor, depth: int) -> Tensor:
        """The ids [B, A, K] of the K = `depth` tokens that a drafter with `copies` drafts at each
        anchor; `NOTHING` where it drafts none, `OWN` where its `copying_head` drafts. Along a known
        text, drafted tokens are assumed to be the text's own."""
        raise NotImplementedError

    @property
    def copying_head(self) -> "tuple[Drafter, int] | None":
        """The drafter with a q that drafts when a drafter with `copies` finds nothing better, and
        its maximum draft length; None if there is no such drafter."""
        return None

    def fit(self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> None:
        """Learn from training texts without gradients, and store the result in buffers. `masks`
        mark the assistant's tokens. Drafters without weights to train are fitted in place of
        training."""
        raise NotImplementedError

    def weigh(
        self,
        cost: "Callable[[Drafter, int], tuple[float, float]]",
        texts: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool]],
        variant: str,
    ) -> None:
        """Measure, before decoding at a temperature, the figures by which a drafter chooses between
        its members. `cost(member, γ)` measures the time of one draft step of a member that drafts γ
        tokens, and of a forward pass over γ + 1 tokens, both in vanilla steps. Where `masks` is
        true, the tokens of `texts` are the target's own responses at that temperature. `variant` is
        the variant of α (see `variant_of`)."""
        raise NotImplementedError

    def hear(self, logits_BNV: Tensor, cache: Any) -> None:
        """Learn from the target's logits after each scout of the last proposal. `cache` is the
        cache of that proposal."""
        raise NotImplementedError

    def require_sound(self) -> None:
        """Raise UserError if buffers, loaded from a damaged file, hold impossible values, such as
        ids outside the target's vocabulary."""

    def beyond_training(self, depth: int, tree: bool) -> str:
        """A note for the user if chains or trees of this depth exceed the drafter's trained depth,
        where tokens are accepted less often; else empty."""
        return ""

    def with_adapters_merged(self, target: Target) -> "tuple[Drafter, Target]":
        """The drafter and the target to decode with, not yet attached. If the drafter
        `adapts_target`, these are a drafter without adapters and a copy of the target with the
        adapters merged; else they are unchanged."""
        return self, target

    def weights_to_save(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a draft on disk, from a state dict. Tensors that only training needs, such
        as adapters on the draft's own weights, are merged into the others."""
        return dict(weights)


def initialisations_of(config: Any) -> Sequence[str]:
    """The possible values of the setting `initialisation` in a config, or in a class of configs."""
    initialisations: Sequence[str] = getattr(config, "initialisations", ("target", "random"))
    return initialisations


def chosen_layers(
    configured: Sequence[int] | None, default: Sequence[int], target: TargetParts
) -> list[int]:
    """The target's layers that a drafter reads: those in its config, or the default. Raises
    UserError for a layer that the target lacks."""
    layers, num_layers = configured or sorted(set(default)), target.depth
    few = "" if configured else "; the default needs more, so give drafter.layers"
    require(
        all(0 < k <= num_layers for k in layers),
        f"drafter.layers={list(layers)}: layers of this target run from 1 to {num_layers}{few}",
    )
    return list(layers)


def require_rising(layers: Sequence[int] | None) -> None:
    """Raise UserError unless the layers to read are None, or distinct and ascending."""
    require(
        layers is None or (len(layers) > 0 and all(a < b for a, b in pairwise(layers))),
        f"drafter.layers={layers}: give distinct layers in rising order, as engines "
        "read them, or null for the default",
    )


class Predictor(Drafter):
    """A drafter with a q at every depth. Subclasses implement `hidden` and `unembed`; the rest has
    defaults."""

    # It estimates its own acceptance (`confidence`). The estimate is trained along with the draft,
    # whatever the draft's own loss (see `LossConfig.loss`).
    estimates_acceptance: ClassVar[bool] = False

    vocab_S: Tensor | None  # target ids of the draft vocabulary, ascending; None = all

    def __init__(self, config: Any, sizes: Any) -> None:
        super().__init__(config, sizes)
        self.register_buffer("vocab_S", None)
        if sizes.draft_vocab:
            self.vocab_S = torch.arange(sizes.draft_vocab)

    @abstractmethod
    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        """Hidden states [B, A, K, D] of every depth at every anchor.

        `drafted_BAK` holds the k = K - 1 tokens drafted so far after each anchor. None means the
        text's own next tokens (teacher forcing), with K = `depth`.
        """

    @abstractmethod
    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """Draft logits [..., S] of depth k from hidden states [..., D]."""

    def confidence(self, hidden_NKD: Tensor) -> Tensor:
        """The acceptance probability [N, K] at each depth as a drafter with `estimates_acceptance`
        estimates it from hidden states. Decoding uses it as the draft's confidence."""
        raise NotImplementedError

    @torch.no_grad()
    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        growth = self.draft_growth(ctx, cache)
        variant = variant_of(choose.sampler.greedy, choose.siblings == "fixed")
        growth.calibration = self.calibrations.for_variant(variant)
        proposal = shape.draft(growth, choose)
        if ctx.cache is not None:
            ctx.cache.drop()  # drafts in the target's own slots, which its pass will overwrite
        q_BGS, V = proposal.q_BGV, self.sizes.target_vocab
        if q_BGS is not None and q_BGS.shape[-1] < V:
            assert self.vocab_S is not None
            q_BGV = q_BGS.new_zeros(*q_BGS.shape[:2], V)
            proposal.q_BGV = q_BGV.index_copy_(-1, self.vocab_S, q_BGS)
        return proposal

    def draft_growth(self, ctx: Context, cache: Any = None) -> Growth:
        """This default recomputes every node's path from the start. Methods with a cache override
        it, and must give the same logits."""

        def logits(anchor_BT: Tensor, drafted_BTK: Tensor) -> Tensor:
            k = drafted_BTK.shape[2]
            return self.unembed(self.hidden(ctx, anchor_BT, drafted_BTK)[:, :, k], k)

        return rereading(ctx, logits)

    def require_sound(self) -> None:
        if (ids_S := self.vocab_S) is not None:
            V, rising = self.sizes.target_vocab, bool((ids_S[1:] > ids_S[:-1]).all())
            require(
                rising and int(ids_S[0]) >= 0 and int(ids_S[-1]) < V,
                f"the ids of the draft vocabulary must rise within 0 to {V - 1}",
            )


def vocabulary(drafter: Drafter | None) -> Tensor | None:
    """The target ids of a drafter's own vocabulary, ascending; None if it is the whole vocabulary,
    as for copied tokens."""
    return drafter.vocab_S if isinstance(drafter, Predictor) else None


def frequent_tokens(texts: Iterable[Iterable[int]], size: int) -> Tensor:
    """The `size` most frequent token ids, ascending [size]: a draft vocabulary.

    Ties go to the lower id. If too few ids occur, the lowest of the other ids are added.
    """
    counts = Counter(chain.from_iterable(texts))
    ranked = sorted({*counts, *range(size)}, key=lambda i: (-counts[i], i))
    return torch.tensor(sorted(ranked[:size]))


@dataclass
class DrafterConfig:
    """The settings of every drafter."""

    name: str
    # draft length in tokens: the number of depths trained and evaluated, and the default of
    # decode.gamma
    depth: int


@dataclass
class DraftVocabConfig(DrafterConfig):
    """The settings of a drafter with an LM head over a vocabulary of its own."""

    # number of tokens in the draft vocabulary: the most frequent ones in the training responses;
    # null: the target's complete vocabulary
    draft_vocab: int | None = 8192


@dataclass
class WindowConfig(DrafterConfig):
    """The settings of a drafter whose layers may attend to a part of the text only."""

    # tokens that each layer attends to, the one that reads included; null: the whole text so far
    window: int | None = None
    # first tokens of the text that each layer attends to besides its window; engines have none
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        require(
            self.window is not None or not self.sink_tokens,
            f"drafter.sink_tokens={self.sink_tokens}: without drafter.window, every token is "
            "attended to already: give drafter.window too",
        )


@dataclass
class AnchorsConfig:
    """The positions that are trained as anchors. A sample of them has the same expected gradient,
    and costs less for methods whose training cost grows with the number of anchors."""

    per_row: int | None = None  # anchors per packed row, drawn anew at every step; null: all

    def __post_init__(self) -> None:
        require_between("drafter.anchors.per_row", self.per_row, 1)

    def draw(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """The weight of each depth at each position [T, K]. Drawn anchors have a higher weight, so
        that the expected loss and its gradient are those of all valid anchors."""
        weight_TK = valid_TK.float()
        usable = valid_TK[:, 0].nonzero()[:, 0]
        if self.per_row is None or len(usable) <= self.per_row:
            return weight_TK
        order = torch.randperm(len(usable), generator=generator)[: self.per_row]
        drawn_T1 = torch.zeros_like(weight_TK[:, :1])
        drawn_T1[usable[order]] = len(usable) / self.per_row
        return weight_TK * drawn_T1


class Trainable(Predictor):
    """A drafter with layers. It implements one `step` through them, which both training and
    drafting call with their own attention (see `attention.py`). Training unrolls it in `hidden` at
    all anchors of a text, given the text's own tokens."""

    learning_rates: Mapping[str, float] = {}  # factors of `optim.lr`, by pattern of weight names
    added: str | tuple[str, ...] = ()  # prefixes of tensors that an earlier draft may lack
    closed_form_depths: int = 2  # number of depths in `solve_closed_form`
    # It has a head for each depth that reads only states of the target: no drafted token, and
    # nothing of another head (`read_by_heads`, `heads_of`). So training needs the tensors of one
    # head at a time (Gloeckle et al. 2024, arXiv 2404.19737, section 2): its logits are made, give
    # their gradient and are freed before the next head's are made, unless the loss couples the
    # depths.
    separate_heads: ClassVar[bool] = False

    @classmethod
    def trains(cls, config: Any) -> bool:
        return True

    @classmethod
    def build(
        cls,
        config: Any,
        target: TargetParts,
        vocab_S: Tensor | None = None,
        earlier: Drafter | None = None,
    ) -> Self:
        """A drafter to train for a target. Its weights are initialised as the config says, or taken
        from an `earlier` draft (see `inherit`).

        `vocab_S` holds the target ids of a pruned draft vocabulary, ascending (as
        `specdec.drafters.frequent_tokens` returns them); without it, the lowest ids are kept.
        """
        drafter = cls(config, cls.plan(config, target))
        if drafter.vocab_S is not None and vocab_S is not None:
            drafter.vocab_S = vocab_S
        drafter.to(target.device)
        drafter.attach(target)
        with torch.no_grad():
            drafter.initialise(target)
            if earlier is not None:
                assert isinstance(earlier, Predictor)
                drafter.inherit(earlier)
        return drafter

    def initialise(self, target: TargetParts) -> None:
        """Set the initial weights."""

    def inherit(self, earlier: Predictor) -> None:
        """Take over the weights of an earlier draft, whose vocabulary must be part of this draft's.
        Rows over the draft vocabulary are matched by token id; rows of tokens that the earlier
        draft lacks keep their initial values. Raises UserError for a tensor that does not fit."""
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
            source = theirs.get(name, torch.empty(0))
            over_vocab = self.vocab_S is not None and x.shape[:1] == self.vocab_S.shape
            if source.shape == x.shape:
                x.copy_(source)
            elif place_S is not None and over_vocab and source.shape == x[place_S].shape:
                x[place_S] = source.to(x)
            else:
                said = f"of shape {list(source.shape)}" if name in theirs else "missing"
                raise UserError(
                    f"the earlier draft's tensor {name!r} is {said}, but {list(x.shape)} is needed"
                    ": give the settings of that draft"
                )

    @property
    def train_depth(self) -> int:
        """The number of depths in the loss: `depth`, or fewer if the method trains on fewer."""
        return self.depth

    def anchors(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """The weight in the loss of each depth at each position of a row [T, K]; a position without
        weight is not an anchor. By default every valid depth has weight 1. If the config has
        `anchors`, a sample of the anchors is drawn, each with weight 1 / its probability, so that
        the expected loss is that of all anchors.

        `valid_TK` marks the depths that predict a token that counts. Both tensors are on the CPU.
        """
        return getattr(self.config, "anchors", AnchorsConfig()).draw(valid_TK, generator)

    def training_hidden(self, ctx: Context, anchors_BA: Tensor, moment: TrainingMoment) -> Tensor:
        """The forward pass of training: hidden states [B, A, K, D] at `train_depth` depths or more.
        Methods that do not train as they draft (noise on hidden states, glancing, parallel depths)
        override this default."""
        return self.hidden(ctx, anchors_BA, None)

    @property
    def closed_form_initialisation(self) -> bool:
        """Whether the config requests a closed-form initialisation, by `solve_closed_form`."""
        return getattr(self.config, "initialisation", None) == "closed_form"

    def solve_closed_form(self, known: Callable[[], Iterable[KnownAnchors]]) -> None:
        """Initialise the weights in closed form, by least squares over a part of the training
        texts. `known()` yields the same part every time. Called only with
        `closed_form_initialisation`."""
        raise NotImplementedError

    def adapted(self, ctx: Context, progress: float) -> tuple[Tensor, float] | None:
        """If the drafter `adapts_target`: the target's final hidden states [B, T, D] with the
        current adapters, and the weight of the draft's own loss at the fraction `progress` of a
        run. The divergence of the adapted target from the original has weight 1."""
        return None

    def read_by_heads(self, ctx: Context, anchors_BA: Tensor) -> Tensor:
        """The states [B, A, K, D] that `separate_heads` read at each anchor, or [B, A, 1, D] if all
        heads read the same state."""
        raise NotImplementedError

    def heads_of(self, read_NKD: Tensor, first: int) -> Tensor:
        """Hidden states [N, K, D] of K depths, from depth `first` on, computed from the inputs of
        their `separate_heads`."""
        raise NotImplementedError

    def beyond_training(self, depth: int, tree: bool) -> str:
        """A note only for drafters that read the target's hidden states: beyond the trained depth,
        they read their own states in place of these, and acceptance falls. A draft that is a
        language model of its own has no such depth."""
        fed_back = self.trains(self.config) and self.needs != HiddenStateSpec()
        if depth <= self.depth or self.limits.depth is not None or not fed_back:
            return ""
        return (
            f"this {self.config.name} was trained to draft {self.depth} tokens in a row but drafts "
            f"{depth} here: the further ones take as long, and fewer of them will be accepted"
        )


def learning_rate(config: Any) -> float:
    """The learning rate if `optim.lr` is null. It is lower after a closed-form initialisation,
    which a higher one spoils."""
    return 3e-4 if getattr(config, "initialisation", None) == "closed_form" else 1e-3


def grow_with_depth(
    grow: Callable[[Tensor, Tensor | None, int], Tensor],
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """A `Growth.grow` made from a function that also takes the depth of the new nodes."""
    depths = [0]  # the depth of the anchor, then of every node

    def grow_at_depth(tokens_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
        depth = 1 + depths[-1 if parents_BT is None else int(parents_BT[0, 0]) + 1]
        depths.extend([depth] * tokens_BT.shape[1])
        return grow(tokens_BT, parents_BT, depth)

    return grow_at_depth


def growth_over(
    cache: SlotCache, ctx: Context, read: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
) -> Growth:
    """The growth of a model with its own cache, which first reads the tokens committed since the
    last speculation step. `read(ids, slots, last)` returns the logits [B, T, S] after ids [B, T].
    Each id follows its slot in `slots` [B, T]; if `slots` is None, the ids form a chain. With
    indices `last` [B, 1], only the logits there [B, 1, S] are returned."""
    new = unread(cache, ctx.counts())
    ids_BT = pieces(ctx.ids_BT, cache.known(), max(new))
    first_B1S = read(ids_BT, None, torch.tensor(new, device=ids_BT.device)[:, None] - 1)
    cache.commit(new)
    return Growth(first_B1S[:, 0], lambda ids, above: read(ids, above, None))


def rereading(ctx: Context, logits: Callable[[Tensor, Tensor], Tensor]) -> Growth:
    """The growth of a drafter without a cache, which recomputes every node's path from the start.
    `logits(anchor_BT, drafted_BTK)` returns the logits [B, T, S] after k tokens drafted at an
    anchor."""
    anchor_B1 = torch.tensor(ctx.counts(), device=ctx.ids_BT.device)[:, None] - 1
    paths: list[list[list[int]]] = [[[]] for _ in ctx.counts()]  # by place: the anchor's first

    def after(num_read: int) -> Tensor:
        last = [known[-num_read:] for known in paths]
        drafted_BTK = torch.tensor(last, dtype=torch.long, device=anchor_B1.device)
        return logits(anchor_B1.expand(-1, num_read), drafted_BTK)

    def grow(tokens_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
        above = [[-1]] * len(paths) if parents_BT is None else (parents_BT + 1).tolist()
        for known, places, tokens in zip(paths, above, tokens_BT.tolist(), strict=True):
            known += [[*known[at], token] for at, token in zip(places, tokens, strict=True)]
        return after(tokens_BT.shape[1])

    return Growth(after(1)[:, 0], grow)


def reading_no_draft(logits: Callable[[int], Tensor]) -> Growth:
    """The growth of a drafter that reads no drafted tokens, given its logits [B, S] by depth."""

    def grow(tokens_BT: Tensor, parents_BT: Tensor | None, depth: int) -> Tensor:
        return logits(depth)[:, None].expand(-1, tokens_BT.shape[1], -1)

    return Growth(
        logits(0), grow_with_depth(grow), lambda depth: torch.stack([*map(logits, range(depth))], 1)
    )

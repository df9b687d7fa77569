"""The drafter interface: one class per family, used by training and by decoding alike.

Letters: B batch, A anchors, k depth, K number of depths, D width, S draft vocabulary, W nodes that
grow at once.

The alignment rule: a drafter reads tokens up to and including the anchor a, and the target's
features strictly before it. Depth k predicts token a + 1 + k, whose target distribution is
`target_logits[a + k]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specdec.context import Context, Moment, Needs, Proposal
from specdec.errors import UserError, require, require_between, require_known, require_within
from specdec.runtime.cache import SlotCache
from specdec.sampling.choose import Choose
from specdec.sampling.trees import DEEPEST, Growth, Shape
from specdec.target.base import Target
from specdec.target.parts import Parts


@dataclass
class AnchorsConfig:
    """Which anchors are trained on: `per_row` of each packed row, drawn again at every step; null
    takes all. It is for families whose training pass costs more with every anchor."""

    per_row: int | None = None

    def __post_init__(self) -> None:
        require_between("drafter.anchors.per_row", self.per_row, 1)

    def draw(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """The weight of each depth at each position [T, K]. The drawn anchors stand for all, so
        the expected loss and its gradient are those of all valid anchors."""
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
    """The sizes of a drafter that the target determines; families that need more extend it.

    `target_vocab` and `draft_vocab` count tokens; a `draft_vocab` of None is the target's own.
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
    trainable: ClassVar[bool] = True  # see `trains`
    reads_body: ClassVar[bool] = False  # runs the target's own layers, so it needs a whole target
    needs: Needs = Needs()
    depth: int  # how many depths are trained and measured; also the default γ
    parallel: bool = False  # depths do not read each other's tokens: `Growth.marginals`
    max_depth: int | None = None  # parallel heads cannot draft more than they have
    in_transformers: ClassVar[str | None] = None  # its name in transformers' generate, for benches
    long_prompts: ClassVar[Mapping[str, Any]] = {}  # configs to measure on long prompts
    copies: bool = False  # drafts tokens that it finds, so there is no q and no second-best token
    chooses: ClassVar[bool] = False  # whether it chooses what to draft, by what `weigh` learns
    positions: int | None = None  # the longest text to draft for, in tokens; None: any
    scratch: int = 0  # slots of a cache that drafting needs besides those of its nodes
    noted_alpha: Sequence[float] = ()  # greedy α by depth on held-out text, if read from disk
    added: str | tuple[str, ...] = ()  # prefixes of tensors that an earlier draft may lack
    vocab_S: Tensor | None  # target ids of the draft vocabulary, ascending; None = all

    def __init__(self, config: Any, sizes: Any) -> None:
        super().__init__()
        bounds = {"depth": (1, DEEPEST), "draft_vocab": 1, "intermediate_size": 1, **self.bounds}
        given = {name: bound for name, bound in bounds.items() if hasattr(config, name)}
        require_within("drafter", config, **given)
        if hasattr(config, "start"):
            require_known("drafter", config, start=("target", "random"))
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
        """The family's `Sizes`, given those of its own. A draft vocabulary that is not smaller than
        the target's is None."""
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

        `vocab_S` holds the target ids of the pruned draft vocabulary, ascending. A config with
        `draft_vocab` needs it (see `specdec.drafters.frequent_tokens`).
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
        """Move or cast as modules do, but only move rotary frequencies: rounded to bfloat16, they
        would be off by up to 0.4 %, which adds up to one radian after 256 positions."""
        exact = {name: x for name, x in self.named_buffers() if name.endswith("inv_freq")}
        super()._apply(fn, recurse)
        for name, x in exact.items():
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            module._buffers[leaf] = x.to(self.get_buffer(name).device)
        return self

    def start(self, target: Parts) -> None:
        """Set the weights that training starts from."""

    def inherit(self, earlier: "Drafter") -> None:
        """Take over the weights of an earlier draft, whose vocabulary must be part of this one's.

        Rows over the draft vocabulary are matched by token id; rows of tokens that the earlier
        draft lacks keep their start. Raises UserError for a tensor that does not fit.
        """
        theirs, place_S = earlier.state_dict(), None
        if self.vocab_S is not None and earlier.vocab_S is not None:
            known_S = earlier.vocab_S.to(self.vocab_S.device)
            require(
                bool(torch.isin(known_S, self.vocab_S).all()),
                "the earlier draft's vocabulary has tokens that this draft's lacks",
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
        """If the target is adapted: its final hidden states [B, T, D] with the adapters as they are
        now, and the weight of the draft's own loss beside the divergence of the adapted target from
        the original, when the share `progress` of a run is done."""
        return None

    def settled(self, target: Target) -> "tuple[Drafter, Target]":
        """The drafter and the target that decode, neither attached yet: these, or if the target was
        adapted, a drafter without adapters and a copy of the target into which they are merged."""
        return self, target

    @property
    def target_vocab(self) -> int:
        return self.sizes.target_vocab

    @property
    def train_depth(self) -> int:
        """How many depths the loss covers; fewer than `depth` where depths are alike."""
        return self.depth

    def anchors(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """The weight in the loss of each depth at each position of a row [T, K]; a position
        without weight is not an anchor. By default every valid depth weighs 1, unless the config
        has `anchors` to draw: each of a sample weighs 1 / its probability, so the expected loss is
        that of all.

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
        """The family's own estimate of α [N, K] at each depth, if it makes one."""
        return None

    def weigh(
        self,
        cost: Callable[["Drafter", int], tuple[float, float]],
        texts: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool]],
    ) -> None:
        """Learn, before decoding at some temperature, what the choice of a draft depends on, for
        families with `chooses`. `cost(member, γ)` measures the time of one draft step of a member
        that drafts γ tokens, and of a pass over γ + 1 tokens, both in plain steps.
        In `texts`, the target answers at that temperature wherever `masks` is true."""

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
        proposal = shape.draft(self.begin(ctx, cache), choose)
        if ctx.cache is not None:
            ctx.cache.drop()  # drafts in the target's own slots, which it is about to write
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
        the start; versions with a cache must give the same."""
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


def growth_at_once(
    first_BS: Tensor,
    logits: Callable[[int, Tensor], Tensor],
    marginals: Callable[[int], Tensor] | None = None,
) -> Growth:
    """The growth of a drafter that has read all depths at once. `first_BS` are the logits of depth
    0. The logits [B, W, S] of another depth may depend on the tokens [B, W] just before it, but on
    no other drafted token."""
    grow = with_depth(lambda tokens_BW, parents_BW, depth: logits(depth, tokens_BW))
    return Growth(first_BS, grow, marginals)


def with_depth(
    grow: Callable[[Tensor, Tensor | None, int], Tensor],
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """`Growth.grow` from a function that also takes the depth of the new nodes."""
    depths = [0]  # the depth of the anchor, then of every node

    def told(tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
        depth = 1 + depths[-1 if parents_BW is None else int(parents_BW[0, 0]) + 1]
        depths.extend([depth] * tokens_BW.shape[1])
        return grow(tokens_BW, parents_BW, depth)

    return told


def growth_over(
    cache: SlotCache, ctx: Context, read: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
) -> Growth:
    """The growth of a model with a cache of its own, which first reads the tokens committed since
    the last round. `read` gives the logits [B, W, S] after ids [B, W] that follow the slots
    [B, W], or as a chain if they are None; or [B, 1, S] at the indices [B, 1], if given."""
    new = unread(cache, ctx.counts())
    ids_BT = pieces(ctx.ids_BT, cache.known(), max(new))
    first_B1S = read(ids_BT, None, torch.tensor(new, device=ids_BT.device)[:, None] - 1)
    cache.keep(new)
    return Growth(first_B1S[:, 0], lambda ids, above: read(ids, above, None))


def reading_no_draft(logits: Callable[[int], Tensor]) -> Growth:
    """The growth of a drafter that reads no drafted tokens, so that the logits [B, S] after a node
    depend only on its depth."""
    return growth_at_once(
        logits(0),
        lambda depth, tokens_BW: logits(depth)[:, None].expand(-1, tokens_BW.shape[1], -1),
        lambda depth: torch.stack([*map(logits, range(depth))], 1),
    )


def chosen_layers(given: Sequence[int] | None, default: Sequence[int], target: Parts) -> list[int]:
    """The target's layers that a drafter reads: those that its config gives, or the default.
    Raises UserError for a layer that the target lacks."""
    layers, L = given or sorted(set(default)), target.config.num_hidden_layers
    few = "" if given else "; name some, as the default needs more layers"
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


def states(
    over_text: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    ctx: Context,
    anchors_BA: Tensor,
    drafted_BAk: Tensor | None,
    depth: int,
) -> Tensor:
    """`Drafter.hidden` of a model that reads only tokens, where depth k at anchor a is depth 0 at
    a + k. `over_text` gives its states [B, T, D] for ids, positions and documents [B, T]."""
    if drafted_BAk is None:
        return windows(over_text(ctx.ids_BT, ctx.position_BT, ctx.document_BT), anchors_BA, depth)
    each = alone(ctx, anchors_BA, drafted_BAk)
    found = torch.stack([over_text(one.ids_BT, None, None)[0, a:] for a, one in each])
    return found.view(*drafted_BAk.shape[:2], drafted_BAk.shape[2] + 1, -1)


def alone(ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor) -> Iterator[tuple[int, Context]]:
    """For each anchor, its place in its document, and that document up to the anchor followed by
    the tokens drafted there, with the target's final states of what precedes the anchor."""
    for b, (anchors, firsts) in enumerate(zip(anchors_BA.tolist(), first_tokens(ctx, anchors_BA))):
        for a, first, drafted_k in zip(anchors, firsts, drafted_BAk[b], strict=True):
            ids_1T = torch.cat([ctx.ids_BT[b, first : a + 1], drafted_k])[None]
            one, lacking = Context(ids_1T), 1 + len(drafted_k)
            if ctx.final_BTD is not None:
                one.final_BTD = pad(ctx.final_BTD[b : b + 1, first:a], (0, 0, 0, lacking))
            yield a - first, one


def first_tokens(ctx: Context, anchors_BA: Tensor) -> list[list[int]]:
    """Where the document of each anchor [B, A] begins."""
    return (anchors_BA - ctx.documents()[0].gather(1, anchors_BA)).tolist()


def tokens_from(ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None, depth: int) -> Tensor:
    """The tokens [B, A, K] that depths 0, 1, … are the first to read: the anchor, and the drafted
    tokens or, for K = `depth`, the text's own."""
    if drafted_BAk is None:
        return text_after(ctx.ids_BT, anchors_BA - 1, depth)
    return torch.cat([ctx.ids_BT.gather(1, anchors_BA)[..., None], drafted_BAk], -1)


def text_after(ids_BT: Tensor, anchors_BA: Tensor, count: int) -> Tensor:
    """The text's own tokens [B, A, count] after each anchor (clamped at the text's end)."""
    return windows(ids_BT[..., None], anchors_BA + 1, count)[..., 0]


def windows(x_BTD: Tensor, first_BA: Tensor, count: int) -> Tensor:
    """`count` entries [B, A, count, D] starting at each index (clamped at the text's end)."""
    steps = torch.arange(count, device=x_BTD.device)
    index = (first_BA[..., None] + steps).clamp_max(x_BTD.shape[1] - 1)
    return entries(x_BTD, index.flatten(1)).view(*index.shape, x_BTD.shape[-1])


def entries(x_BTD: Tensor, index_BA: Tensor) -> Tensor:
    """The entries [B, A, D] of each row at that row's indices."""
    return x_BTD.gather(1, index_BA[..., None].expand(-1, -1, x_BTD.shape[-1]))


def pieces(x_BT: Tensor, starts: list[int], count: int) -> Tensor:
    """`count` entries of each row [B, count, …] from that row's start (padded by the last one)."""
    if len(set(starts)) == 1 and starts[0] + count <= x_BT.shape[1]:
        return x_BT[:, starts[0] : starts[0] + count]
    index = torch.tensor(starts, device=x_BT.device)[:, None]
    index = index + torch.arange(count, device=x_BT.device)
    rows = torch.arange(len(starts), device=x_BT.device)[:, None]
    return x_BT[rows, index.clamp_max(x_BT.shape[1] - 1)]


def last_of(x_BTD: Tensor, counts: list[int]) -> Tensor:
    """The last real entry [B, D] of each row; row b has `counts[b]` of them."""
    return pieces(x_BTD, [n - 1 for n in counts], 1)[:, 0]


def unread(cache: SlotCache, counts: list[int], least: int = 1) -> list[int]:
    """How many of each row's `counts[b]` entries a draft's cache has not read yet.

    It is at least `least` per row: drafting again from the same anchor rereads the last entry.
    The cache forgets the drafts of the previous round.
    """
    cache.drop()
    if len(cache.lengths) != len(counts):
        cache.lengths = [0] * len(counts)
    known = cache.known()
    cache.lengths = [
        length - max(0, n + least - count)
        for length, n, count in zip(cache.lengths, known, counts, strict=True)
    ]
    return [max(least, count - n) for n, count in zip(known, counts, strict=True)]


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

"""The drafter interface: one class a family, used by training and by decoding alike.

Letters: B batch, A anchors, k depth, K depths in all, D width, S draft vocabulary, W nodes grown at
once.

The alignment rule: a drafter reads tokens up to and including the anchor a, and the target's
features strictly before it. Depth k predicts token a + 1 + k, whose target distribution is
`target_logits[a + k]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from specdec.context import Context, Moment, Needs, Proposal
from specdec.errors import UserError, require, require_between, require_within
from specdec.runtime.cache import SlotCache
from specdec.sampling.choose import Choose
from specdec.sampling.trees import DEEPEST, Growth, Shape
from specdec.target.parts import Parts


@dataclass
class AnchorsConfig:
    """Which anchors are trained on: `per_row` of each packed row, drawn anew at every step; null:
    all of them. For families whose training pass costs more for every anchor."""

    per_row: int | None = None

    def __post_init__(self) -> None:
        require_between("drafter.anchors.per_row", self.per_row, 1)

    def draw(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """What each depth at each position weighs [T, K]: those drawn stand for all, so that the
        expected loss, and its gradient, are those of all valid anchors."""
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
    """What the target determines of a drafter; families with more to remember extend it.

    `target_vocab` and `draft_vocab` are numbers of tokens; no draft vocabulary: the target's.
    Together with the config it is written to a draft's card, so all fields are plain JSON.
    """

    target_vocab: int
    draft_vocab: int | None = None


class Drafter(nn.Module, ABC):
    """Proposes tokens. A family gives `hidden` and `unembed`; the rest has defaults.

    A drafter is made of its config (what the user chose) and its sizes (what the target then
    determined), so that a draft on disk can be read without planning it again. Frozen parts that
    belong to the target (its embedding) are attached, never saved.
    """

    Config: ClassVar[type]  # the dataclass that configures the family
    Sizes: ClassVar[type[Sizes]] = Sizes
    bounds: ClassVar[Mapping[str, int | tuple[int, int]]] = {}  # of settings; see `require_within`
    trainable: ClassVar[bool] = True
    reads_body: ClassVar[bool] = False  # runs the target's own layers: its parts are not enough
    needs: Needs = Needs()
    depth: int  # depths that are trained and measured, and the γ drafted by default
    parallel: bool = False  # depths do not read each other's tokens: `Growth.marginals`
    max_depth: int | None = None  # parallel heads cannot draft more than they have
    in_transformers: ClassVar[str | None] = None  # its name in `generate` there, for benches
    long_prompts: ClassVar[Mapping[str, Any]] = {}  # configs to measure on them
    copies: bool = False  # drafts tokens that it finds: there is no q, and no second-best token
    positions: int | None = None  # texts longer than this are not drafted for; None: any
    scratch: int = 0  # slots of the target's cache that drafting needs beside those of its nodes
    vocab_S: Tensor | None  # target ids of the draft vocabulary, ascending; None = all

    def __init__(self, config: Any, sizes: Any) -> None:
        super().__init__()
        bounds = {"depth": (1, DEEPEST), "draft_vocab": 1, "intermediate_size": 1, **self.bounds}
        given = {name: bound for name, bound in bounds.items() if hasattr(config, name)}
        require_within("drafter", config, **given)
        self.config = config
        self.sizes = sizes
        self.depth = config.depth
        self.register_buffer("vocab_S", None)
        if sizes.draft_vocab:
            self.vocab_S = torch.arange(sizes.draft_vocab)

    @classmethod
    def plan(cls, config: Any, target: Parts) -> Any:
        """The `Sizes` of a drafter with this config for this target."""
        return cls.Sizes(target_vocab=target.vocab_size)

    @classmethod
    def build(
        cls,
        config: Any,
        target: Parts,
        vocab_S: Tensor | None = None,
        earlier: "Drafter | None" = None,
    ) -> Self:
        """A drafter to be trained for a target, its weights started as the config says, or with
        those of an `earlier` draft (see `inherit`).

        `vocab_S` are the target ids of the pruned draft vocabulary, ascending, which a config with
        `draft_vocab` needs (see `specdec.drafters.frequent_tokens`).
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

    def start(self, target: Parts) -> None:
        """Set the weights that training starts from."""

    def inherit(self, earlier: "Drafter") -> None:
        """Take over the weights of an earlier draft, whose vocabulary this one's includes.

        Rows over the draft vocabulary follow their token ids; those of tokens that the earlier
        draft lacks stay as they started. Raises UserError for a tensor that does not fit.
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
            if name == "vocab_S":
                continue
            found = theirs.get(name)
            said = "missing" if found is None else f"of shape {list(found.shape)}"
            if found is not None and found.shape == x.shape:
                x.copy_(found)
            elif (
                found is not None
                and (self.vocab_S is not None and place_S is not None)
                and x.shape[:1] == self.vocab_S.shape
                and found.shape == (len(place_S), *x.shape[1:])
            ):
                x[place_S] = found.to(x)
            else:
                raise UserError(
                    f"the earlier draft's tensor {name!r} is {said}, and {list(x.shape)} is needed"
                )

    def begin_training(self, inherited: bool) -> None:
        """Add what only training needs (adapters) to fresh weights, or to the `inherited` ones of a
        draft that is trained further."""

    def finished(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a draft on disk holds of a state dict: all but what `begin_training` added."""
        return dict(weights)

    def fit(self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> None:
        """Learn from training texts without gradients (counts, an index), into buffers. `masks`
        mark the tokens that the assistant says."""

    def require_sound(self) -> None:
        """Raise UserError where loaded buffers hold what no fit can have made, such as ids outside
        the target's vocabulary."""
        if (ids_S := self.vocab_S) is not None:
            rising = bool((ids_S[1:] > ids_S[:-1]).all() and ids_S[0] >= 0)
            require(
                rising and int(ids_S[-1]) < self.target_vocab,
                f"the draft vocabulary does not rise within 0 to {self.target_vocab - 1}",
            )

    def attach(self, target: Parts) -> None:
        """Take hold of the frozen parts of the target that the drafter reads."""

    @property
    def target_vocab(self) -> int:
        return self.sizes.target_vocab

    @property
    def train_depth(self) -> int:
        """Depths that the loss is taken over; fewer than `depth` where depths are alike."""
        return self.depth

    def anchors(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """What each depth at each position of a row weighs in the loss [T, K]; a position without
        weight is no anchor. By default every valid depth weighs 1. A family that draws some gives
        each 1 over its probability of being drawn, so that the expected loss is that of all.

        `valid_TK` says which depths predict a token that counts; both are on the CPU.
        """
        return valid_TK.float()

    @abstractmethod
    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        """Hidden states [B, A, K, D] of every depth at every anchor.

        `drafted_BAk` are the k = K - 1 tokens drafted so far after each anchor; None stands for
        the text's own next tokens at the trained depth (teacher forcing), K = `depth`.
        """

    def training_hidden(self, ctx: Context, anchors_BA: Tensor, moment: Moment) -> Tensor:
        """The forward pass of training: hidden states [B, A, K, D] at `train_depth` depths or
        more. Families that train in another way than they draft (noise on features, glancing,
        parallel depths) replace this default."""
        return self.hidden(ctx, anchors_BA, None)

    @abstractmethod
    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """Draft logits [..., S] of depth k from hidden states [..., D]."""

    def unembed_all(self, hidden_NKD: Tensor) -> Tensor:
        """Draft logits [N, K, S] of all depths."""
        depths = range(hidden_NKD.shape[1])
        return torch.stack([self.unembed(hidden_NKD[:, k], k) for k in depths], 1)

    def confidence(self, hidden_NKD: Tensor) -> Tensor | None:
        """The family's own guess of α [N, K] at each depth, where it makes one."""
        return None

    def new_cache(self, capacity: int | None = None) -> Any:
        """What drafting may keep between the rounds of one generation, with a `select(rows)`;
        None: nothing. `capacity` fixes the slots of families whose passes can be compiled."""
        return None

    @torch.no_grad()
    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        """Draft after the last token of each row of `ctx`, the anchor, in the given shape.

        `ctx` is always the whole context; a cache only saves work, and never changes what is
        drafted. Families that copy tokens replace this method.
        """
        proposal = shape.draft(self.begin(ctx, cache), choose)
        if ctx.cache is not None:
            ctx.cache.drop()  # what was drafted in the target's own slots, which it writes next
        q_BNS = proposal.q_BNV
        if q_BNS is not None and q_BNS.shape[-1] < self.target_vocab:
            assert self.vocab_S is not None
            q_BNV = q_BNS.new_zeros(*q_BNS.shape[:2], self.target_vocab)
            proposal.q_BNV = q_BNV.index_copy_(-1, self.vocab_S, q_BNS)
        return proposal

    def hear(self, logits_BXV: Tensor, cache: Any) -> None:
        """Take what the target said after each of the scouts of the last proposal; `cache` is the
        one that was drafted with. Only families that send scouts are asked."""
        raise NotImplementedError

    def begin(self, ctx: Context, cache: Any = None) -> Growth:
        """The state of one round at its anchors. This default, which cached versions must equal,
        reads every node's path again from the start."""
        anchor_B1 = torch.tensor(ctx.counts(), device=ctx.ids_BT.device)[:, None] - 1
        paths: list[list[list[int]]] = [[[]] for _ in ctx.counts()]  # by place: the anchor's first

        def logits(paths: list[list[list[int]]]) -> Tensor:
            drafted_BWk = torch.tensor(paths, dtype=torch.long, device=anchor_B1.device)
            _, W, k = drafted_BWk.shape
            hidden = self.hidden(ctx, anchor_B1.expand(-1, W), drafted_BWk)
            return self.unembed(hidden[:, :, k], k)

        def grow(tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
            above = [[-1]] * len(paths) if parents_BW is None else (parents_BW + 1).tolist()
            rows = zip(paths, above, tokens_BW.tolist(), strict=True)
            new = [
                [[*known[place], token] for place, token in zip(places, tokens, strict=True)]
                for known, places, tokens in rows
            ]
            for known, more in zip(paths, new, strict=True):
                known += more
            return logits(new)

        return Growth(logits(paths)[:, 0], grow)


def states(
    over_text: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    ctx: Context,
    anchors_BA: Tensor,
    drafted_BAk: Tensor | None,
    depth: int,
) -> Tensor:
    """`Drafter.hidden` of a model that reads tokens alone, so that depth k at anchor a is depth 0
    at a + k. `over_text` gives its states [B, T, D] for ids, positions and documents [B, T]."""
    if drafted_BAk is None:
        return windows(over_text(ctx.ids_BT, ctx.position_BT, ctx.document_BT), anchors_BA, depth)
    found = []
    for b, (anchors, firsts) in enumerate(zip(anchors_BA.tolist(), first_tokens(ctx, anchors_BA))):
        for i, (a, first) in enumerate(zip(anchors, firsts, strict=True)):
            ids = torch.cat([ctx.ids_BT[b, first : a + 1], drafted_BAk[b, i]])[None]
            found.append(over_text(ids, None, None)[0, a - first :])
    return torch.stack(found).view(*drafted_BAk.shape[:2], drafted_BAk.shape[2] + 1, -1)


def first_tokens(ctx: Context, anchors_BA: Tensor) -> list[list[int]]:
    """Where the document of each anchor [B, A] begins."""
    if ctx.position_BT is None:
        return torch.zeros_like(anchors_BA).tolist()
    return (anchors_BA - ctx.position_BT.gather(1, anchors_BA)).tolist()


def text_after(ids_BT: Tensor, anchors_BA: Tensor, count: int) -> Tensor:
    """The text's own tokens [B, A, count] after each anchor (clamped at the text's end)."""
    return windows(ids_BT[..., None], anchors_BA + 1, count)[..., 0]


def windows(x_BTD: Tensor, first_BA: Tensor, count: int) -> Tensor:
    """`count` entries [B, A, count, D] from each index on (clamped at the text's end)."""
    steps = torch.arange(count, device=x_BTD.device)
    index = (first_BA[..., None] + steps).clamp_max(x_BTD.shape[1] - 1)
    return entries(x_BTD, index.flatten(1)).view(*index.shape, x_BTD.shape[-1])


def entries(x_BTD: Tensor, index_BA: Tensor) -> Tensor:
    """Entries [B, A, D] of each row, at its own indices."""
    return x_BTD.gather(1, index_BA[..., None].expand(-1, -1, x_BTD.shape[-1]))


def pieces(x_BT: Tensor, starts: list[int], count: int) -> Tensor:
    """`count` entries of each row [B, count, …] from its own start (padded by its last one)."""
    if len(set(starts)) == 1 and starts[0] + count <= x_BT.shape[1]:
        return x_BT[:, starts[0] : starts[0] + count]
    index = torch.tensor(starts, device=x_BT.device)[:, None]
    index = index + torch.arange(count, device=x_BT.device)
    rows = torch.arange(len(starts), device=x_BT.device)[:, None]
    return x_BT[rows, index.clamp_max(x_BT.shape[1] - 1)]


def last_of(x_BTD: Tensor, counts: list[int]) -> Tensor:
    """The last real entry [B, D] of each row, which has `counts[b]` of them."""
    return pieces(x_BTD, [n - 1 for n in counts], 1)[:, 0]


def unread(cache: SlotCache, counts: list[int]) -> list[int]:
    """How many entries of each row, of `counts[b]` in all, a draft's cache has not read yet.

    At least one a row: drafting again from the same anchor reads its last one anew. What was
    drafted in the round before is forgotten.
    """
    cache.drop()
    if len(cache.lengths) != len(counts):
        cache.lengths = [0] * len(counts)
    known = cache.known()
    cache.lengths = [
        length - max(0, n + 1 - count)
        for length, n, count in zip(cache.lengths, known, counts, strict=True)
    ]
    return [max(1, count - n) for n, count in zip(known, counts, strict=True)]


def copied_chains(found: list[list[int]], ctx: Context) -> Proposal:
    """A proposal of given tokens for each row, as long as the longest."""
    longest = max(map(len, found))
    padded = [ids + [-1] * (longest - len(ids)) for ids in found]
    return Proposal(torch.tensor(padded, dtype=torch.long, device=ctx.ids_BT.device))


def one_hot(hidden: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V] of the ids [..., 1]: 0 there, -inf elsewhere, and throughout for -1."""
    token = hidden.long()
    logits = hidden.new_full((*token.shape[:-1], vocab_size), -torch.inf)
    value = torch.zeros_like(hidden).masked_fill(token < 0, -torch.inf)
    return logits.scatter(-1, token.clamp_min(0), value)

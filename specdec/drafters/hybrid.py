"""A hybrid: a drafter that copies where the text repeats, and another one, its head, elsewhere.

What the two find is almost disjoint, so together they commit more than either. In each round every
row drafts what should commit the most tokens per second: m copied tokens, γ tokens of the head, or
none. `walltime_by_gamma` (Theorem 3.8 of Leviathan et al. 2023 with acceptance by depth) gives the
rate of each, with the head's α and its cost c for the one, and for the other c = 0 and the share of
copied tokens that were right at that depth after a match as long and as frequent. Those shares are
counted in `fit`, on texts that the copying member has not seen, and start from `prior`.

The choice reads nothing but the text, so it is the same in every batch and with every cache, and
it is lossless at any temperature: a copied token is a point mass. In a tree whose nodes are not
drawn at random the two stand side by side: the copied chain becomes a branch of the head's tree,
and what both begin with is stored once. In a tree of drawn siblings one of the two is chosen.

Letters: B batch, A anchors, N nodes, K depth, D width, V vocabulary, E cells of evidence.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.context import Context, Proposal
from specdec.drafters.base import Drafter, Sizes, copied_chains, one_hot, text_after
from specdec.drafters.copying.memory import Copying, Memories, Memory, copied_trees
from specdec.errors import UserError, nearest, require, require_between
from specdec.files import record
from specdec.sampling.choose import Choose
from specdec.sampling.trees import Chain, Shape
from specdec.target.parts import Parts
from specdec.theory.leviathan import pass_cost, walltime_by_gamma

HEAD = -2  # in place of a copied token: the head's; -1: none
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # the shortest match of each cell
UNSEEN = 0.8  # share of the texts that the copying member learns before copying is counted
COUNTED = 20_000  # tokens at most at which copying is counted
PRIOR = (0.3, 0.55, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97)  # share that is right after such a match
SURE = 0.7  # share of a match's occurrences that its next token follows, for the second half of E
UNSURE = 0.45  # factor of the prior below it
WEIGHT = 20.0  # of the prior, in counted tokens


@dataclass
class HybridConfig:
    """`head` is a trained draft's folder, such as runs/NAME/best, or a family that needs no
    training; `copying` is the family that copies up to `depth` tokens. The head drafts up to
    `gamma`. `alpha` is the head's acceptance by depth (the last holds for further ones; null: what
    its run noted), `c` the time of one of its steps and `v` that of a pass over γ + 1 tokens, by γ,
    both over that of a plain step; they are measured anew before decoding is."""

    name: str = "hybrid"
    depth: int = 8
    head: str = ""
    copying: str = "suffix"
    gamma: int = 2
    alpha: list[float] | None = None
    c: float = 0.1
    v: dict[int, float] = field(default_factory=lambda: {2: 1.2, 8: 1.5})

    def __post_init__(self) -> None:
        require_between("drafter.gamma", self.gamma, 1)
        sound = self.alpha is None or (self.alpha and all(0 <= a <= 1 for a in self.alpha))
        require(bool(sound), f"drafter.alpha={self.alpha}: give numbers between 0 and 1, by depth")
        require(self.c >= 0, f"drafter.c={self.c}: give 0 or more")
        pass_cost(self.v)  # raises where a time is not above 0


@dataclass
class Member:
    """A member's family, config and sizes, as on its own card."""

    family: str
    config: dict[str, Any]
    sizes: dict[str, Any]


@dataclass(kw_only=True)
class HybridSizes(Sizes):
    copier: Member
    head: Member


class Both:
    """The memory of each row, and the head's own cache."""

    def __init__(self, head: Any) -> None:
        self.memories, self.head = Memories(), head

    def select(self, rows: Sequence[int]) -> None:
        self.memories.select(rows)
        if self.head is not None:
            self.head.select(rows)


class Hybrid(Drafter):
    Config = HybridConfig
    Sizes = HybridSizes
    trainable = False
    copies = True
    reads_body = True  # where its head does
    families: ClassVar[Mapping[str, type[Drafter]]] = {}  # `specdec.drafters` sets it
    sizes: HybridSizes
    copier: Copying
    head: Drafter
    tried_EK: Tensor
    right_EK: Tensor

    def __init__(self, config: HybridConfig, sizes: HybridSizes) -> None:
        super().__init__(config, sizes)
        self.copying_family(sizes.copier.family)
        self.copier, self.head = self._made(sizes.copier), self._made(sizes.head)
        self.needs, self.positions = self.head.needs, self.head.positions
        self.parallel, self.max_depth = self.head.parallel, self.head.max_depth
        self.longest = min(config.depth, self.max_depth or config.depth)
        self.gamma = min(config.gamma, self.max_depth or config.gamma)
        self.depth = self.longest  # what `hidden` covers: an evaluation may ask for less
        self.scratch = self.head.scratch + self.longest  # a copied branch joins the nodes of a tree
        none_EK = torch.zeros(2 * len(LENGTHS), config.depth, dtype=torch.long)
        self.register_buffer("tried_EK", none_EK)
        self.register_buffer("right_EK", none_EK.clone())
        self._costs = config.c, pass_cost(config.v)
        self._rates: tuple[list[list[float]], list[float]] | None = None

    @classmethod
    def family(cls, name: str) -> type[Drafter]:
        require(name in cls.families, f"drafter {name!r} is unknown{nearest(name, cls.families)}")
        return cls.families[name]

    @classmethod
    def copying_family(cls, name: str) -> type[Copying]:
        """The family of this name. Raises UserError unless it copies from the text alone."""
        kind = cls.family(name)
        if not issubclass(kind, Copying) or kind.reads_body:
            raise UserError(f"{name} does not copy from the text alone: give a family that does")
        return kind

    def _made(self, member: Member) -> Any:
        kind = self.family(member.family)
        config: Any = record(kind.Config, member.config, f"the config of its {member.family}")
        sizes = record(kind.Sizes, member.sizes, f"the sizes of its {member.family}")
        require(
            sizes.target_vocab == self.target_vocab,
            f"its {member.family} is for {sizes.target_vocab} tokens, not {self.target_vocab}",
        )
        return kind(config, sizes)

    @classmethod
    def plan(cls, config: HybridConfig, target: Parts) -> HybridSizes:
        return cls.build(config, target).sizes

    @classmethod
    def build(
        cls,
        config: HybridConfig,
        target: Parts,
        vocab_S: Tensor | None = None,
        earlier: Drafter | None = None,
    ) -> "Hybrid":
        """`earlier` is the head, if it is a trained draft. Raises UserError for members that cannot
        be combined."""
        copying = cls.copying_family(config.copying)
        copier = copying.build(copying.Config(), target)
        if (head := earlier) is None:
            kind = cls.family(config.head)
            require(
                not kind.trainable,
                f"drafter.head={config.head} must be trained first: give the folder of a draft, "
                "such as runs/NAME/best",
            )
            head = kind.build(kind.Config(), target)
        require(not head.copies, f"drafter.head: {head.config.name} copies too: give another draft")
        sizes = HybridSizes(
            target_vocab=target.vocab_size, copier=described(copier), head=described(head)
        )
        if config.alpha is None:
            config = replace(config, alpha=noted_alpha(head) or [0.4])
        drafter = cls(config, sizes)
        drafter.copier, drafter.head = copier, head
        drafter.to(target.device)
        drafter.attach(target)
        return drafter

    def attach(self, target: Parts) -> None:
        self.copier.attach(target)
        self.head.attach(target)

    def fit(self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> None:
        """Let the members learn the texts, and count how often copied tokens are right: after the
        first texts, on the others, at the places where a decoder's rounds would start."""
        first = int(UNSEEN * len(texts))
        self.copier.fit(texts[:first], masks[:first])
        tried, right = (torch.zeros_like(self.tried_EK).tolist() for _ in range(2))
        left = COUNTED
        for ids, mask in zip(texts[first:], masks[first:], strict=True):
            memory, start = self.copier.memory(), 0
            for t, token in enumerate(ids[: left - 1]):
                memory.push(token)
                if t < start or t + 1 == len(ids) or not mask[t + 1]:
                    continue
                guesses, start = memory.chain(self.longest), t + 1
                e = cell(memory)
                for k, (guess, said) in enumerate(zip(guesses, ids[t + 1 :])):
                    tried[e][k] += 1
                    if guess != said:
                        break
                    right[e][k] += 1
                    start += 1
            left -= len(ids)
        self.tried_EK, self.right_EK = (self.tried_EK.new_tensor(x) for x in (tried, right))
        self._rates = None
        self.copier.fit(texts, masks)
        self.head.fit(texts, masks)
        self.sizes.copier, self.sizes.head = described(self.copier), described(self.head)

    def require_sound(self) -> None:
        super().require_sound()
        self.copier.require_sound()
        self.head.require_sound()
        sound = (self.right_EK >= 0) & (self.right_EK <= self.tried_EK)
        require(bool(sound.all()), "tensors 'tried_EK' and 'right_EK' do not count what can occur")

    def weigh(self, cost: Callable[[Drafter, int], tuple[float, float]]) -> None:
        gamma, v = self.gamma, dict[int, float]()
        c, v[gamma] = cost(self.head, gamma)
        for n in {1, self.longest} - {gamma}:
            v[n] = cost(self.copier, n)[1]
        self._costs, self._rates = (c, pass_cost(v)), None

    def rates(self) -> tuple[list[list[float]], list[float]]:
        """Tokens per plain step's time of 0, 1, 2, … copied tokens in each cell, and of as many
        tokens of the head."""
        if self._rates is None:
            (c, v), alpha = self._costs, self.config.alpha or [0.4]
            tried_EK, right_EK = self.tried_EK.cpu(), self.right_EK.cpu()
            shares = (WEIGHT * prior(tried_EK.shape[1]) + right_EK) / (WEIGHT + tried_EK)
            alpha = [*alpha, *alpha[-1:] * self.gamma]
            self._rates = (
                [walltime_by_gamma(a, 0.0, self.longest, v) for a in shares.tolist()],
                walltime_by_gamma(alpha, c, self.gamma, v),
            )
        return self._rates

    def copied(self, memory: Memory, alone: bool = True) -> list[int]:
        """The tokens to copy at the end of a text. `alone`: none if the head's are worth more."""
        found = memory.chain(self.longest)
        of_cells, of_head = self.rates()
        rates = of_cells[cell(memory)][: len(found) + 1]
        best = max(rates)
        return found[: rates.index(best)] if not alone or best >= max(of_head) else []

    def _marks(self, memory: Memory) -> list[int]:
        """What is drafted at the end of a text: copied tokens, or `HEAD` for each of the head's."""
        return self.copied(memory) or [HEAD] * self._drafted()

    def _drafted(self) -> int:
        """The γ at which the head commits the most tokens per second; 0 if a plain step does."""
        rates = self.rates()[1]
        return rates.index(max(rates))

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        """[B, A, K, 1 + D]: the copied id, `HEAD` or -1, and then the head's states."""
        K = self.depth if drafted_BAk is None else drafted_BAk.shape[-1] + 1
        if drafted_BAk is None:
            drafted_BAk = text_after(ctx.ids_BT, anchors_BA, K - 1)
        marks_BAK1 = self.copier.walked(ctx, anchors_BA, K, self._marks)
        depth = min(K, self.gamma)
        own = self.head.hidden(ctx, anchors_BA, drafted_BAk[..., : depth - 1])
        self._dtype = own.dtype
        own = pad(own.float(), (0, 0, 0, K - depth))  # float32 holds ids up to 2^24 exactly
        return torch.cat([marks_BAK1, own], -1)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """The head's logits over the target's vocabulary where it drafts; elsewhere 0 at the copied
        token and -inf for all others."""
        logits = one_hot(hidden[..., :1], self.target_vocab)
        own = hidden[..., 0] == HEAD
        if own.any():
            found = self.head.unembed(hidden[own][:, 1:].to(self._dtype), k)
            logits[own] = self._widened(found.float())
        return logits

    def _widened(self, logits_NS: Tensor) -> Tensor:
        if (vocab_S := self.head.vocab_S) is None:
            return logits_NS
        wide_NV = logits_NS.new_full((len(logits_NS), self.target_vocab), -torch.inf)
        return wide_NV.index_copy_(1, vocab_S, logits_NS)

    def new_cache(self, capacity: int | None = None) -> Both:
        return Both(self.head.new_cache(capacity))

    @torch.no_grad()
    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        cache, side_by_side = cache or Both(None), not isinstance(shape, Chain)
        side_by_side = side_by_side and (shape.fixed or choose.siblings == "fixed")
        memories = cache.memories.read(ctx.rows(), self.copier.memory)
        copies = [self.copied(m, alone=not side_by_side)[: shape.depth] for m in memories]
        if isinstance(shape, Chain):
            shape = Chain(min(shape.depth, self._drafted()), shape.stop)
        if shape.depth == 0 or (all(copies) and not side_by_side):
            return copied_chains(copies, ctx)
        choose = replace(choose, vocab_S=self.head.vocab_S)
        if choose.siblings != "fixed":  # a row that copies draws nothing from its generator
            unused = torch.Generator(ctx.ids_BT.device).manual_seed(0)
            of_rows = zip(choose.generators, copies, strict=True)
            choose.generators = [unused if ids else own for own, ids in of_rows]
        found = self.head.draft(ctx, shape, choose, cache.head)
        return (joined if side_by_side else replaced)(found, copies)


def described(drafter: Drafter) -> Member:
    return Member(drafter.config.name, asdict(drafter.config), asdict(drafter.sizes))


def cell(memory: Memory) -> int:
    """The cell of evidence [0, E) for the chain that a memory looked up last."""
    length, share = memory.evidence()
    return of_length(max(1, length)) + len(LENGTHS) * (share >= SURE)


def of_length(n: int) -> int:
    return bisect_right(LENGTHS, n) - 1


def prior(depths: int) -> Tensor:
    """The share of copied tokens [E, K] that should be right: as after a match that is longer by
    the tokens before, which were right."""
    sure = [[PRIOR[of_length(n + k)] for k in range(depths)] for n in LENGTHS]
    unsure = [[UNSURE * first, *others] for first, *others in sure]
    return torch.tensor(unsure + sure)


def noted_alpha(head: Drafter) -> list[float]:
    """Greedy α by depth on held-out text, as the run that trained this draft noted it."""
    try:
        return [float(a) for a in head.notes["held_out"]["by_depth"]["greedy"]]
    except (KeyError, TypeError, ValueError):
        return []


def replaced(found: Proposal, copies: list[list[int]]) -> Proposal:
    """The proposal with a copied chain in place of each row that has one."""
    tokens_BN, q_BNV, parents_BN = found.tokens_BN, found.q_BNV, found.parents_BN
    more = max(0, max(map(len, copies)) - tokens_BN.shape[1])
    tokens_BN = pad(tokens_BN, (0, more), value=-1)
    q_BNV = None if q_BNV is None else pad(q_BNV, (0, 0, 0, more))
    parents_BN = None if parents_BN is None else pad(parents_BN, (0, more), value=-1)
    for b, ids in enumerate(copies):
        if not ids:
            continue
        copied_N = tokens_BN.new_tensor(ids + [-1] * (tokens_BN.shape[1] - len(ids)))
        tokens_BN[b] = copied_N
        if parents_BN is not None:
            parents_BN[b] = torch.arange(-1, len(copied_N) - 1, device=copied_N.device)
        if q_BNV is not None:
            q_BNV[b] = one_hot(copied_N[:, None].float(), q_BNV.shape[-1]).exp()
    return Proposal(tokens_BN, q_BNV, parents_BN)


def joined(found: Proposal, copies: list[list[int]]) -> Proposal:
    """A tree of fixed nodes with a copied chain as another branch of each row."""
    trees = []
    parents = (found.above_BN - 1).tolist()
    for tokens, above, ids in zip(found.tokens_BN.tolist(), parents, copies, strict=True):
        nodes, parent = list(zip(tokens, above, strict=True)), -1
        for token in ids:
            if (token, parent) not in nodes:
                nodes.append((token, parent))
            parent = nodes.index((token, parent))
        trees.append(nodes)
    return copied_trees(trees, found.tokens_BN.device)

"""A draft LM with a different tokenizer from the target's (Timor et al. 2025, "Accelerating LLM
Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies").

Every speculation step converts the target's text to the draft's tokens; the draft's cache is kept
up to the first token that differs. There are two methods for the way back:

- `tli`, token-level intersection (Algorithm 4): the draft's logits are masked to the tokens that
  both vocabularies have, so every verification method and draft shape works. In teacher forcing, a
  depth after a token outside the intersection does not count as drafted, because a decoder never
  gets there.
- `slem`, string-level exact match (Algorithm 2; "universal assisted generation"): the draft writes
  greedily, and its text, turned into target tokens, is proposed with q None. It can draft any
  token, but only chains. In teacher forcing, the draft writes on from each anchor without
  seeing how the text continues: at T > 0, the text may have departed from the proposal before a
  later depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from operator import eq
from typing import Any

import torch
from torch import Tensor

from specdec.context import Context, HiddenStateSpec, Proposal
from specdec.drafters.attention import first_tokens, last_of, unread
from specdec.drafters.base import NOTHING, Drafter, DrafterConfig, Predictor, Sizes
from specdec.drafters.copying import copied_chains, copied_growth
from specdec.errors import UserError, require, require_known, require_within
from specdec.lab.drafters.bridge import Bridge
from specdec.runtime.cache import SlotCache
from specdec.sampling.choose import Choose
from specdec.sampling.trees import Growth, Shape
from specdec.targets.loading import load_target
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from specdec.targets.target_config import DTYPES, TargetConfig

METHODS = ("tli", "slem")


@dataclass
class TranslatedConfig(DrafterConfig):
    """A draft model with a tokenizer of its own."""

    name: str = "translated"
    depth: int = 5
    source: str = ""  # the draft model, named as a target is in target.path
    # tli: logits masked to the tokens in both vocabularies; slem: greedy text, re-tokenised for the
    # target (chains only)
    method: str = "tli"
    # tokens of its own that the draft writes per speculation step of slem; null: depth
    draft_tokens: int | None = None


@dataclass(kw_only=True)
class TranslatedSizes(Sizes):
    """`draft_fingerprint` identifies the draft LM's weights, which are not saved with the draft."""

    draft_fingerprint: str


class Translated(Predictor):
    """A draft LM with another tokenizer; its config's `method` chooses between the two methods.
    With `slem` it `copies` the text that the draft wrote, and with `tli` it has a q over the
    intersection."""

    Config = TranslatedConfig
    Sizes = TranslatedSizes

    def __init__(self, config: TranslatedConfig, sizes: TranslatedSizes) -> None:
        super().__init__(config, sizes)
        self.copies = config.method == "slem"
        self.register_buffer("draft_S", torch.zeros(sizes.draft_vocab or 0, dtype=torch.long))
        self.draft_S: Tensor
        self.lm: Target  # the draft, attached: frozen, and never saved
        self.bridge: Bridge

    @classmethod
    def build(
        cls,
        config: TranslatedConfig,
        target: TargetParts,
        vocab_S: Tensor | None = None,
        earlier: Drafter | None = None,
    ) -> "Translated":
        """Build the drafter. Its draft vocabulary is the intersection, independent of `vocab_S`."""
        drafter = super().build(config, target)
        if config.method == "tli":
            ids = drafter.bridge.common(target.vocab_size, drafter.lm.vocab_size)
            drafter.vocab_S, drafter.draft_S = (torch.tensor(x, device=target.device) for x in ids)
            drafter.attach(target)
        return drafter

    @classmethod
    def plan(cls, config: TranslatedConfig, target: TargetParts) -> TranslatedSizes:
        require_known("drafter", config, method=METHODS)
        require_within("drafter", config, draft_tokens=1)
        lm = _loaded(config, target)
        common = None
        if config.method == "tli":
            bridge = Bridge(target.tokenizer, lm.tokenizer)
            common = len(bridge.common(target.vocab_size, lm.vocab_size)[0])
            require(
                common > 0,
                f"drafter.source={config.source!r} has no token in common with the target's "
                "vocabulary: give drafter.method=slem",
            )
        own = {"draft_vocab": common, "draft_fingerprint": lm.fingerprint()}
        return cls.Sizes.of_config(config, target, **own)

    def attach(self, target: TargetParts) -> None:
        self.lm = _loaded(self.config, target)
        if self.lm.fingerprint() != self.sizes.draft_fingerprint:
            raise UserError(
                f"drafter.source={self.config.source!r} has other weights than when this draft was "
                "made: give the model with those weights, or make the draft again"
            )
        self.bridge = Bridge(target.tokenizer, self.lm.tokenizer)
        if self.config.method == "tli":
            self._unembed = self.lm.unembedding(self.draft_S)

    def new_cache(self, capacity: int | None = None) -> "TranslatedCache":
        return TranslatedCache(self.lm.config.num_hidden_layers)

    def after_texts(self, texts: Sequence[list[int]], cache: "TranslatedCache") -> Tensor:
        """The draft's hidden states [B, D] after texts in target tokens."""
        rows = self.lm.embedding.num_embeddings  # a tokenizer may have ids beyond them
        known = [[i for i in self.bridge.to_draft(ids) if i < rows] or [0] for ids in texts]
        owns = list(map(self._fitting, known))
        before = cache.tokens or [[] for _ in owns]
        cache.lengths = [sum(takewhile(bool, map(eq, *pair))) for pair in zip(before, owns)]
        new = unread(cache, list(map(len, owns)))
        longest = max(new)
        tails = [own[len(own) - n :] + [0] * (longest - n) for own, n in zip(owns, new)]
        hidden_BTD = self.continued(torch.tensor(tails, device=self.lm.device), cache)
        cache.commit(new)
        cache.tokens = owns
        return last_of(hidden_BTD, new)

    def continued(
        self, ids_BT: Tensor, cache: "TranslatedCache", parents_BT: Tensor | None = None
    ) -> Tensor:
        """Hidden states [B, T, D] of uncommitted tokens, given in the draft's own ids."""
        return self.lm.hidden_states(ids_BT, HiddenStateSpec(), cache=cache, parents_BT=parents_BT)[
            1
        ]

    def _fitting(self, own: list[int]) -> list[int]:
        """The end of a text that fits the draft's positions. It is shortened in large steps, so
        that the cache stays valid."""
        positions = getattr(self.lm.config, "max_position_embeddings", None) or len(own) + 256
        room = positions - min(64, positions // 4)
        over, leap = len(own) - room, max(1, room // 2)
        return own if over <= 0 else own[-(-over // leap) * leap :]

    # Token-level intersection

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        """Hidden states [B, A, K, D + 1], whose last column is 0, or -inf where a token before that
        depth cannot be drafted."""
        depth = self.depth if drafted_BAK is None else drafted_BAK.shape[-1] + 1
        states = []
        for b, (ids, firsts) in enumerate(zip(ctx.ids_BT.tolist(), first_tokens(ctx, anchors_BA))):
            cache = self.new_cache()
            for i, (a, first) in enumerate(zip(anchors_BA[b].tolist(), firsts)):
                after = ids[a + 1 : a + depth] if drafted_BAK is None else drafted_BAK[b, i]
                after_k = torch.as_tensor(after, dtype=torch.long)
                states.append(self._forced(ids[first : a + 1], after_k, depth, cache))
        return torch.stack(states).view(*anchors_BA.shape, depth, -1).to(anchors_BA.device)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """Draft logits over the intersection."""
        return self._unembed(hidden[..., :-1]) + hidden[..., -1:]

    def draft_growth(self, ctx: Context, cache: "TranslatedCache | None" = None) -> Growth:
        """The growth over the draft's cache, which first reads the part of the text that has
        changed."""
        if self.copies:
            return copied_growth(ctx, self.copied, self.sizes.target_vocab)
        if cache is None:
            return super().draft_growth(ctx)

        def grow(tokens_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
            own_BT, _ = self.own_ids(tokens_BT)
            return self._unembed(self.continued(own_BT, cache, parents_BT))

        return Growth(self._unembed(self.after_texts(ctx.rows(), cache)), grow)

    def own_ids(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The draft's ids for target tokens, and which of those tokens are in the intersection."""
        assert self.vocab_S is not None
        index = torch.searchsorted(self.vocab_S, tokens).clamp_max(len(self.vocab_S) - 1)
        return self.draft_S[index], self.vocab_S[index] == tokens

    def _forced(
        self, text: list[int], after_k: Tensor, depth: int, cache: "TranslatedCache"
    ) -> Tensor:
        """Hidden states [K, D + 1] at the end of a text and after each token that follows it."""
        hidden_KD = self.after_texts([text], cache)
        own_k, known_k = self.own_ids(after_k.to(self.lm.device))
        if len(own_k):
            hidden_KD = torch.cat([hidden_KD, self.continued(own_k[None], cache)[0]])
        out = hidden_KD.new_zeros(depth, hidden_KD.shape[1] + 1)
        out[: len(hidden_KD), :-1] = hidden_KD
        # nothing can be drafted after a token outside the intersection, or past the text's end
        out[1 + int(known_k.cumprod(0).sum()) :, -1] = -torch.inf
        return out

    # String-level exact match

    def copied(self, ctx: Context, anchors_BA: Tensor, depth: int) -> Tensor:
        rows = []
        for ids, firsts, ends in zip(
            ctx.ids_BT.tolist(), first_tokens(ctx, anchors_BA), anchors_BA.tolist()
        ):
            cache = self.new_cache()
            texts = (ids[first : a + 1] for a, first in zip(ends, firsts))
            written = [self._written([text], cache)[0][:depth] for text in texts]
            rows.append([own + [NOTHING] * (depth - len(own)) for own in written])
        return torch.tensor(rows, dtype=torch.long, device=anchors_BA.device)

    @torch.no_grad()
    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        if not self.copies:
            return super().draft(ctx, shape, choose, cache)
        written = self._written(ctx.rows(), cache or self.new_cache())
        return copied_chains([ids[: shape.depth] for ids in written], ctx)

    def _written(self, texts: list[list[int]], cache: "TranslatedCache") -> list[list[int]]:
        """The draft's continuation of each text, in target tokens."""
        last_BD = self.after_texts(texts, cache)
        steps: list[list[int]] = []
        for n in range(self.config.draft_tokens or self.depth):
            if n:
                own_B1 = torch.tensor(steps[-1], device=self.lm.device)[:, None]
                last_BD = self.continued(own_B1, cache)[:, -1]
            steps.append(self.lm.logits(last_BD).float().argmax(-1).tolist())
        rows = [list(row) for row in zip(*steps)]
        drafted = map(self.bridge.to_target, texts, cache.tokens, rows)
        return [list(takewhile(self.sizes.target_vocab.__gt__, ids)) for ids in drafted]


class TranslatedCache(SlotCache):
    """The draft's keys and values, and the tokens of each row that they belong to."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.tokens: list[list[int]] = []

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.tokens = [self.tokens[b] for b in rows if self.tokens]


def _loaded(config: TranslatedConfig, target: TargetParts) -> Target:
    require(bool(config.source), "drafter.source is missing: give the draft's hub name or folder")
    require(
        target.tokenizer is not None,
        "drafter=translated needs the target's tokenizer, and this one has none: give another",
    )
    dtype = next(name for name, dtype in DTYPES.items() if dtype == target.dtype)
    return _load(config.source, dtype, str(target.device))


@lru_cache(maxsize=1)  # `plan` and `attach` share one model
def _load(source: str, dtype: str, device: str) -> Target:
    try:
        lm = load_target(TargetConfig(path=source, dtype=dtype, device=device))
    except UserError as error:
        raise UserError(str(error).replace("target.path", "drafter.source")) from error
    require(
        not lm.model.config.is_encoder_decoder,
        f"drafter.source={source!r} is an encoder-decoder: give a decoder-only LM",
    )
    lm.new_cache()  # raises UserError if rejected tokens could not be dropped
    require(
        lm.reads_trees,
        f"drafter.source={source!r} {lm.only_chains}: give a model with attention layers only",
    )
    return lm

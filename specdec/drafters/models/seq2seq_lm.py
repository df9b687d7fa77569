"""A smaller encoder-decoder with the target's tokenizer drafts (Leviathan et al. 2023: T5-small
for T5-XXL). Its own encoder reads the prompt once; its decoder then reads tokens, and nothing else
of the target.

Letters: B batch, T time, A anchors, K depth, D width, S draft vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from specdec.context import Context
from specdec.drafters.base import last_of, pieces, states, unread
from specdec.drafters.models.pretrained import (
    LMSizes,
    LoraOptions,
    Pretrained,
    described,
    overridden,
)
from specdec.errors import UserError, require
from specdec.sampling.trees import Growth
from specdec.target.encoder_decoder import Seq2SeqTarget
from specdec.target.parts import Parts
from specdec.target.seq2seq import Seq2SeqCache, Seq2SeqModel


@dataclass
class Seq2SeqLMConfig:
    """Where the draft comes from.

    `source`: a hub name or a folder, or "random": the target's architecture with `overrides` of
    its config and fresh weights. `train_embeddings=false` leaves the embedding and the LM head
    as they start. `lora.rank` above 0 trains adapters alone, of which nothing is left in the
    finished draft.
    """

    name: str = "seq2seq_lm"
    depth: int = 5
    source: str = "google-t5/t5-small"
    overrides: dict[str, Any] = field(
        default_factory=lambda: {"num_layers": 2, "num_decoder_layers": 2}
    )
    train_embeddings: bool = False
    lora: LoraOptions = field(default_factory=LoraOptions)


class Seq2SeqLM(Pretrained):
    Config = Seq2SeqLMConfig
    Auto = AutoModelForSeq2SeqLM

    @classmethod
    def plan(cls, config: Seq2SeqLMConfig, target: Parts) -> LMSizes:
        if not isinstance(target, Seq2SeqTarget):
            raise UserError(
                "drafter=seq2seq_lm drafts for an encoder-decoder target: give drafter=lm, or a "
                "target such as T5"
            )
        if config.source == "random":
            model = overridden(config, target.model.config.to_dict())
        else:
            model = described(
                config.source, "random, a hub name or a folder with a Hugging Face encoder-decoder"
            )
            require(
                bool(model.get("is_encoder_decoder")),
                f"drafter.source={config.source!r} is not an encoder-decoder, as the target is",
            )
        for key, theirs in (
            ("vocab_size", target.vocab_size),
            ("decoder_start_token_id", target.seq2seq.start),
        ):
            if model.get(key) != theirs:
                raise UserError(
                    f"drafter.source={config.source!r} has {key}={model.get(key)}, the target "
                    f"{theirs}: they must be of the same tokenizer"
                )
        return LMSizes(target_vocab=target.vocab_size, model=model)

    def attach(self, target: Parts) -> None:
        self.seq2seq = Seq2SeqModel(self.model)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        """As `LM.hidden`; 0 at anchors among the encoder's tokens."""
        return states(self._whole, ctx, anchors_BA, drafted_BAk, self.depth)

    def _whole(self, ids: Tensor, position: Tensor | None, document: Tensor | None) -> Tensor:
        out, spread = self.seq2seq.run(ids, position_BT=position, document_BT=document)
        return spread(out)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden)
        bias = getattr(self.model, "final_logits_bias", None)
        return logits if bias is None else logits + bias[0]

    def new_cache(self) -> Seq2SeqCache:
        return self.seq2seq.new_cache()

    def begin(self, ctx: Context, cache: Seq2SeqCache | None = None) -> Growth:
        return super().begin(ctx) if cache is None else CachedGrowth(self, ctx, cache)


class CachedGrowth:
    """Growth over the draft's own caches, which first read the tokens committed since."""

    def __init__(self, drafter: Seq2SeqLM, ctx: Context, cache: Seq2SeqCache) -> None:
        self.drafter, self.cache = drafter, cache
        counts = ctx.counts()
        if not cache.starts:
            out, spread = drafter.seq2seq.run(ctx.ids_BT[:, : max(counts)], cache)
            cache.keep(counts)
            last_BD = last_of(spread(out), counts)
        else:
            new = unread(cache, [n - start for n, start in zip(counts, cache.starts, strict=True)])
            hidden_BTD = self._read(pieces(ctx.ids_BT, cache.known(), max(new)), None)
            cache.keep(new)
            last_BD = last_of(hidden_BTD, new)
        self.logits_BS = drafter.unembed(last_BD, 0)

    def grow(self, tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
        return self.drafter.unembed(self._read(tokens_BW, parents_BW), 1)

    def marginals(self, depth: int) -> Tensor | None:
        return None

    def _read(self, ids_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
        return self.drafter.seq2seq.run(ids_BT, self.cache, parents_BT)[0]

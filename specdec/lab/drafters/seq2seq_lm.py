"""A smaller encoder-decoder with the target's tokenizer drafts (Leviathan et al. 2023: T5-small
for T5-XXL). Its own encoder reads the prompt once; its decoder then reads only the target's
tokens.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from specdec.drafters.attention import entries
from specdec.drafters.pretrained import DraftLMConfig, LMSizes, Pretrained, fitted
from specdec.errors import UserError, require
from specdec.lab.targets.seq2seq import Seq2SeqCache, Seq2SeqModel, Seq2SeqTarget
from specdec.runtime.quantised import without_method
from specdec.targets.parts import TargetParts


@dataclass
class Seq2SeqLMConfig(DraftLMConfig):
    """An encoder-decoder model that drafts for an encoder-decoder target."""

    name: str = "seq2seq_lm"
    depth: int = 5
    source: str = "google-t5/t5-small"
    overrides: dict[str, Any] = field(
        default_factory=lambda: {"num_layers": 2, "num_decoder_layers": 2}
    )


class Seq2SeqLM(Pretrained):
    Config = Seq2SeqLMConfig
    Auto = AutoModelForSeq2SeqLM

    @classmethod
    def plan(cls, config: Seq2SeqLMConfig, target: TargetParts) -> LMSizes:
        if not isinstance(target, Seq2SeqTarget):
            raise UserError(
                "drafter=seq2seq_lm drafts for an encoder-decoder target: give drafter=lm, or a "
                "target such as T5"
            )
        options = "random, a hub name or a folder with a Hugging Face encoder-decoder"
        model = cls.model_config(config, without_method(target.model.config.to_dict()), options)
        require(
            bool(model.get("is_encoder_decoder")),
            f"drafter.source={config.source!r} has no encoder, but the target has: give {options}",
        )
        model, rows = fitted(config.source, model, target)
        ours, theirs = model.get("decoder_start_token_id"), target.seq2seq.start
        require(
            ours == theirs,
            f"drafter.source={config.source!r} has decoder_start_token_id={ours}, but the target "
            f"has {theirs}: give a model with the target's tokenizer",
        )
        return cls.Sizes.of_config(config, target, model=model, draft_vocab=rows)

    def attach(self, target: TargetParts) -> None:
        self.seq2seq = Seq2SeqModel(self.model)

    def over_text(self, ids: Tensor, position: Tensor | None, document: Tensor | None) -> Tensor:
        """Like `Pretrained.over_text`, with 0 at the encoder's tokens."""
        out, split = self.seq2seq.head_input(ids, position, document)
        return split.spread(out)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        bias = getattr(self.model, "final_logits_bias", None)
        logits = super().unembed(hidden, k)
        return logits if bias is None else logits + bias[0, : logits.shape[-1]]

    def new_cache(self, capacity: int | None = None) -> Seq2SeqCache:
        return self.seq2seq.new_cache()

    def over_cache(
        self, cache: Any, ids_BT: Tensor, parents_BT: Tensor | None, last_B1: Tensor | None
    ) -> Tensor:
        if cache.starts:
            hidden = self.seq2seq.continued(ids_BT, cache, parents_BT)
        else:
            out, split = self.seq2seq.head_input(ids_BT, cache=cache)
            hidden = split.spread(out)
        return self.unembed(hidden if last_B1 is None else entries(hidden, last_B1), 0)

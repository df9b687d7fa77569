"""An encoder-decoder target (T5, BART), which decodes and trains as a causal one does.

Letters: B batch, T time, D width, V vocabulary.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdec.context import Context, Needs
from specdec.errors import UserError, require
from specdec.runtime.cache import SlotCache
from specdec.sampling.choose import Processor
from specdec.target.base import Target, concatenated
from specdec.target.checks import check_encoder_decoder, understood
from specdec.target.parts import UNBOUNDED
from specdec.target.seq2seq import Seq2SeqCache, Seq2SeqModel

# One turn: what is asked goes to the encoder, the last answer to the decoder.
TEMPLATE = (
    "{%% for m in messages %%}{%% if loop.last and m['role'] == 'assistant' %%}"
    "%(eos)s%(start)s{{ m['content'] }}%(eos)s"
    "{%% else %%}{%% if not loop.first %%}{{ '\n' }}{%% endif %%}{{ m['content'] }}{%% endif %%}"
    "{%% endfor %%}{%% if add_generation_prompt %%}%(eos)s%(start)s{%% endif %%}"
)


class Seq2SeqTarget(Target):
    """A frozen encoder-decoder LM: its texts are cut as seq2seq.py describes.

    Chains, trees and ragged batches decode as with a causal target. `config` is the decoder's:
    `num_hidden_layers` counts its layers. A tokenizer without a chat template is given one, on a
    copy. Raises UserError for a model that would be read wrongly here.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, revision: str | None = None) -> None:
        super().__init__(model, tokenizer, name, revision)
        with understood(f"target {name!r} ({type(model).__name__})"):
            self.seq2seq = Seq2SeqModel(model)
        self.layers = self.seq2seq.layers
        self.config = copy.deepcopy(self.config)
        self.config.num_hidden_layers = len(self.layers)
        if getattr(self.config, "max_position_embeddings", None) is None:
            self.config.max_position_embeddings = UNBOUNDED
        self.head = _with_bias(model)
        self._scale = _unscaled  # `Seq2SeqModel.run` returns what the head reads
        if tokenizer is not None and not getattr(tokenizer, "chat_template", None):
            self.tokenizer = copy.deepcopy(tokenizer)
            start = tokenizer.convert_ids_to_tokens(self.seq2seq.start)
            self.tokenizer.chat_template = TEMPLATE % {"eos": tokenizer.eos_token, "start": start}
        check_encoder_decoder(self, self.seq2seq.start, self.seq2seq.twice)

    def prompt(self, text: str) -> list[int]:
        """The tokens that `decode` continues: the encoder's, then the decoder's start token."""
        return self.tokenizer(text).input_ids + [self.seq2seq.start]

    def begun(self, encoder: Sequence[int]) -> list[int]:
        """The tokens that `decode` continues, made of those of the encoder. Raises UserError where
        the two could not be told apart again."""
        start, twice = self.seq2seq.start, self.seq2seq.twice
        text = [*encoder, start]
        try:
            (cut,) = self.seq2seq.starts(torch.tensor([text]))
        except UserError:
            cut = -1
        ends = "end with the eos and hold it nowhere twice" if twice else "not hold it"
        require(
            cut == len(encoder),
            f"the decoder's start token ({start}) comes after the encoder's tokens, "
            f"which must {ends}: give those alone, and mask padding with attention_mask",
        )
        return text

    def placed(self, prompt: Sequence[int]) -> int:
        return len(prompt) - self.seq2seq.starts(torch.tensor([prompt]))[0]

    def shown(self, processors: Sequence[Processor]) -> list[Processor]:
        """As `Target.shown`: the decoder's tokens, from the start token on."""

        def of_decoder(processor: Processor) -> Processor:
            def processed(ids_BT: Tensor, scores_BV: Tensor) -> Tensor:
                rows = zip(self.seq2seq.starts(ids_BT), ids_BT, scores_BV)
                return torch.cat(
                    [processor(ids[None, n:], scores[None]) for n, ids, scores in rows]
                )

            return processed

        return [of_decoder(p) for p in processors]

    def new_cache(self, capacity: int | None = None) -> Seq2SeqCache:
        require(
            capacity is None,
            "an encoder-decoder target is not compiled (its prompts have no fixed size): leave "
            "compiled off",
        )
        return self.seq2seq.new_cache()

    @torch.no_grad()
    def features(
        self,
        ids_BT: Tensor,
        needs: Needs,
        *,
        cache: SlotCache | None = None,
        parents_BT: Tensor | None = None,
        position_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
    ) -> tuple[Context, Tensor]:
        """As `Target.features`, of the decoder; 0 at the encoder's tokens.

        Raises UserError for a text without the decoder's start token.
        """
        assert cache is None or isinstance(cache, Seq2SeqCache)
        with self._watched(needs) as seen:
            out, spread = self.seq2seq.run(ids_BT, cache, parents_BT, position_BT, document_BT)
        final_BTD = spread(out)
        layers = concatenated(seen, needs)
        layers = None if layers is None else spread(layers)
        final = final_BTD if needs.final_hidden else None
        return Context(ids_BT, layers, final, document_BT, position_BT), final_BTD


def _with_bias(model: Any) -> nn.Linear:
    """The LM head, with BART's `final_logits_bias` as its bias."""
    head: nn.Linear = model.get_output_embeddings()
    bias = getattr(model, "final_logits_bias", None)
    if bias is None or not bias.any():
        return head
    whole = nn.Linear(head.in_features, head.out_features, device="meta")
    whole.weight = head.weight
    whole.bias = nn.Parameter(bias[0].to(head.weight.dtype), requires_grad=False)
    return whole


def _unscaled(x: Tensor) -> Tensor:
    return x

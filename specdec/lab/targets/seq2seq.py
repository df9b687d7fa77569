"""An encoder-decoder target (T5, BART), which decodes and trains like a causal one.

A text consists of the encoder's tokens, the decoder's start token, and the response. Other code
uses the complete text; this file splits it at the start token: the encoder reads the tokens before
it once, the decoder reads the rest. The encoder's tokens have no decoder state, so hidden states
are 0 there.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSeq2SeqLM
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from specdec.compat import relative_position_bucket
from specdec.context import HiddenStateSpec
from specdec.errors import UserError, require
from specdec.runtime.cache import Place, SlotCache, cache_argument, model_inputs
from specdec.targets.parts import UNBOUNDED
from specdec.targets.self_check import (
    ROUGH,
    SAME,
    error_unlike_transformers,
    twin_check_of,
    understood,
)
from specdec.targets.shrunken_twin import distance
from specdec.targets.target import PassStates, Reading, Target, concatenated

NO_START = (
    "the prompt has no decoder start token: give the encoder's tokens and then that token, as "
    "target.prompt(text) does"
)
# One turn: the question goes to the encoder, the last response to the decoder.
TEMPLATE = (
    "{%% for m in messages %%}{%% if loop.last and m['role'] == 'assistant' %%}"
    "%(eos)s%(start)s{{ m['content'] }}%(eos)s"
    "{%% else %%}{%% if not loop.first %%}{{ '\n' }}{%% endif %%}{{ m['content'] }}{%% endif %%}"
    "{%% endfor %%}{%% if add_generation_prompt %%}%(eos)s%(start)s{%% endif %%}"
)
# The encoder's states of prompts [N, T, D], and which of them are real [N, T] (None: all)
Memory = tuple[Tensor, Tensor | None]


class Seq2SeqCache(SlotCache):
    """The decoder's self-attention in slots, along with the encoder's states and the keys and
    values of cross-attention, which do not change."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.starts: list[int] = []  # where each row's decoder starts in its text; []: none yet
        self.memory: Memory | None = None
        self.cross = DynamicCache()
        self._prefilled = False

    def known(self) -> list[int]:
        """Like `SlotCache.known`, but also counts the encoder's tokens."""
        starts = self.starts or [0] * len(self.lengths)
        return [s + n for s, n in zip(starts, self.lengths, strict=True)]

    def commit(self, counts: Sequence[int], path_BK: Tensor | None = None) -> None:
        """Like `SlotCache.commit`, but the first call's `counts` cover whole prompts."""
        if not self._prefilled:
            counts = [n - start for n, start in zip(counts, self.starts, strict=True)]
            require(min(counts) > 0, NO_START)
            self._prefilled = True
        super().commit(counts, path_BK)

    def select(self, rows: Sequence[int]) -> None:
        if self.memory is None:  # nothing was read yet
            return
        super().select(rows)
        index = torch.tensor(rows, device=self.memory[0].device)
        self.starts = [self.starts[b] for b in rows]
        states, mask = self.memory
        self.memory = states[index], None if mask is None else mask[index]
        self.cross.batch_select_indices(index)


class Split(NamedTuple):
    """Documents of a batch, split at their start tokens, and the places of the decoders' tokens."""

    encoder_NT: Tensor
    mask_NT: Tensor | None  # mask of the encoder's real tokens; None: all
    decoder_NT: Tensor
    real_decoder_NT: Tensor
    where_BT: Tensor
    starts: list[int]

    def spread(self, x_NTD: Tensor) -> Tensor:
        """The states in the layout of the batch [B, T, D], with 0 at the encoder's tokens."""
        whole = x_NTD.new_zeros(*self.where_BT.shape, x_NTD.shape[-1])
        return whole.index_put((self.where_BT,), x_NTD[self.real_decoder_NT])


class Seq2SeqModel:
    """An encoder-decoder model that is run over texts; its weights need not be frozen. An encoder
    that has read a short text with full attention (BigBird-Pegasus) is switched back to sparse
    blocks for the next long one. While the model runs, hooks give the decoder its tokens'
    positions, which T5 and BART would derive from the length of the cache: that is wrong for ragged
    rows, trees and uncommitted tokens. Raises UserError for a model that gets positions in another
    way."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.encoder, self.decoder = model.get_encoder(), model.get_decoder()
        self._blocks = getattr(self.encoder, "attention_type", None) is not None
        # whether texts of unequal length cannot be encoded in one batch
        self.encodes_apart = self._blocks
        generation = model.generation_config
        ids = [getattr(c, "decoder_start_token_id", None) for c in (generation, model.config)]
        self.start: int = next((i for i in ids if i is not None), -1)
        require(self.start >= 0, "the model's config has no decoder_start_token_id: add it there")
        eos = generation.eos_token_id
        self.twice = self.start in (eos if isinstance(eos, list | tuple) else (eos,))
        self._biased = [m for m in self.decoder.modules() if hasattr(m, "relative_attention_bias")]
        self._table = getattr(self.decoder, "embed_positions", None)
        of_bias = bool(self._biased) and all(hasattr(m, "compute_bias") for m in self._biased)
        require(
            of_bias or (not self._biased and isinstance(self._table, nn.Embedding)),
            f"{type(model).__name__} counts its decoder's positions in a way that is not "
            "supported: give a T5, T5-v1.1, mT5 or BART",
        )
        config = model.config
        scaled = getattr(config, "scale_decoder_outputs", False)  # T5's, LongT5's and Pop2Piano's
        if config.model_type == "switch_transformers":
            scaled = config.tie_word_embeddings
        self.scale = config.d_model**-0.5 if scaled else 1.0

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers."""
        layers: nn.ModuleList = (
            self.decoder.block if hasattr(self.decoder, "block") else self.decoder.layers
        )
        return layers

    def new_cache(self) -> Seq2SeqCache:
        return Seq2SeqCache(len(self.layers))

    def starts(self, ids_BT: Tensor) -> list[int]:
        """The place of the decoder's start token in each row. If that token is also the eos (BART),
        it is the one that follows the encoder's eos."""
        start_BT = ids_BT == self.start
        if self.twice:
            start_BT = nn.functional.pad(start_BT[:, 1:] & start_BT[:, :-1], (1, 0))
        first_B = start_BT.int().argmax(-1)
        require(bool((start_BT.any(-1) & (first_B > 0)).all()), NO_START)
        return first_B.tolist()

    def split(
        self, ids_BT: Tensor, position_BT: Tensor | None = None, document_BT: Tensor | None = None
    ) -> Split:
        """Split every document at its start token. Documents begin where `position_BT` is 0;
        padding (`document_BT` below 0) is skipped."""
        where_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        encoders, decoders = [], []
        for b, ids_T in enumerate(ids_BT):
            begins = [0] if position_BT is None else (position_BT[b] == 0).nonzero()[:, 0].tolist()
            for begin, end in zip(begins, [*begins[1:], len(ids_T)]):
                if document_BT is None or document_BT[b, begin] >= 0:
                    (start,) = self.starts(ids_T[None, begin:end])
                    where_BT[b, begin + start : end] = True
                    encoders.append(ids_T[begin : begin + start])
                    decoders.append(ids_T[begin + start : end])
        real_encoder_NT, real_decoder_NT = (
            pad_sequence([torch.ones_like(x) for x in parts], batch_first=True) > 0
            for parts in (encoders, decoders)
        )
        encoder_NT, decoder_NT = (pad_sequence(x, batch_first=True) for x in (encoders, decoders))
        mask_NT = None if bool(real_encoder_NT.all()) else real_encoder_NT
        lengths = list(map(len, encoders))
        return Split(encoder_NT, mask_NT, decoder_NT, real_decoder_NT, where_BT, lengths)

    def head_input(
        self,
        ids_BT: Tensor,
        position_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
        cache: Seq2SeqCache | None = None,
    ) -> tuple[Tensor, Split]:
        """The LM head's input [N, T, D] for complete texts, and their split. With a `cache`, the
        texts are prompts and are cached."""
        split = self.split(ids_BT, position_BT, document_BT)
        (N, decoder_length), encoder_length = split.decoder_NT.shape, split.encoder_NT.shape[1]
        longest = getattr(self.encoder.config, "max_position_embeddings", None) or UNBOUNDED
        require(
            longest >= encoder_length,
            f"a prompt of {encoder_length} tokens does not fit the {longest} positions of the "
            "encoder: give fewer tokens",
        )
        memory = self._encoded(split), split.mask_NT
        if cache is None:
            place = Place(torch.arange(decoder_length, device=ids_BT.device).expand(N, -1))
        else:
            place = cache.place(split.decoder_NT)
            cache.starts, cache.memory = split.starts, memory
        return self._decode(split.decoder_NT, place, memory, cache), split

    def _encoded(self, split: Split) -> Tensor:
        """The encoder's states [N, T, D]; those of padding are arbitrary."""
        if not self.encodes_apart or split.mask_NT is None:
            return self._encode(split.encoder_NT, split.mask_NT)
        rows, states = list[Tensor](), list[Tensor]()
        for length in sorted(set(split.starts)):
            rows_n = torch.tensor([n == length for n in split.starts]).nonzero()[:, 0]
            part = self._encode(split.encoder_NT[rows_n, :length], None)
            rows.append(rows_n)
            states.append(nn.functional.pad(part, (0, 0, 0, split.encoder_NT.shape[1] - length)))
        return torch.cat(states)[torch.cat(rows).argsort()]

    def _encode(self, ids_NT: Tensor, mask_NT: Tensor | None) -> Tensor:
        config = self.encoder.config
        if (
            self._blocks
            and self.encoder.attention_type != config.attention_type
            # as transformers decides, which switches to full attention, but never back
            and ids_NT.shape[1] > (5 + 2 * config.num_random_blocks) * config.block_size
        ):
            with torch.random.fork_rng(devices=[]):  # new parts draw weights and drop them
                self.encoder.set_attention_type(config.attention_type)
        states: Tensor = self.encoder(input_ids=ids_NT, attention_mask=mask_NT).last_hidden_state
        return states

    def continued(
        self, ids_BT: Tensor, cache: Seq2SeqCache, parents_BT: Tensor | None = None
    ) -> Tensor:
        """The LM head's input [B, T, D] for decoder tokens that continue the cached ones."""
        place = cache.place(ids_BT, parents_BT)
        if place.mask_BTP is None:  # one token, which sees all slots
            seen_BTP = ids_BT.new_ones(*ids_BT.shape, cache.shown, dtype=torch.bool)
            place = place._replace(mask_BTP=seen_BTP)
        assert cache.memory is not None
        return self._decode(ids_BT, place, cache.memory, cache)

    def _decode(
        self, ids_BT: Tensor, place: Place, memory: Memory, cache: Seq2SeqCache | None
    ) -> Tensor:
        mask = model_inputs(self.decoder.config, place, self.model.dtype)["attention_mask"]
        with self._standing(place):
            theirs = None if cache is None else EncoderDecoderCache(cache, cache.cross)
            out_BTD = self.decoder(
                input_ids=ids_BT,
                attention_mask=mask,
                encoder_hidden_states=memory[0],
                encoder_attention_mask=memory[1],
                use_cache=cache is not None,
                **{cache_argument(self.decoder): theirs},
            ).last_hidden_state
        scaled_BTD: Tensor = out_BTD if self.scale == 1 else out_BTD * self.scale
        return scaled_BTD

    @contextmanager
    def _standing(self, place: Place) -> Iterator[None]:
        """Within the block, the decoder takes its tokens' positions from `place`."""
        inputs_of = [(m, {"position_bias": self._bias(m, place)}) for m in self._biased]
        with ExitStack() as stack:
            if (table := self._table) is not None and not inputs_of:
                inputs_of = [(table, {"position_ids": place.position_BT.new_zeros(1)})]
                # the hook replaces the table's own look-up, which fails beyond its last row: tokens
                # that will be cut off a response may lie there, and take that row
                index_BT = place.position_BT + getattr(table, "offset", 0)
                weight = table.weight
                rows_BTD = nn.functional.embedding(index_BT.clamp_max(len(weight) - 1), weight)
                stack.enter_context(table.register_forward_hook(lambda *_: rows_BTD))
            for module, inputs in inputs_of:

                def told(_module: Any, args: Any, kwargs: Any, inputs: Any = inputs) -> Any:
                    return args, kwargs | inputs

                stack.enter_context(module.register_forward_pre_hook(told, with_kwargs=True))
            yield

    def _bias(self, attention: Any, place: Place) -> Tensor:
        """T5's position bias [B or 1, H, T, P] for the tokens at `place`."""
        position_BT, slot_BP = place.position_BT, place.slot_position_BP
        if slot_BP is None:
            keys = position_BT.shape[1] if place.mask_BTP is None else place.mask_BTP.shape[2]
            slot_BP = torch.arange(keys, device=position_BT.device)[None]
            if len(position_BT) > 1 and bool((position_BT == position_BT[:1]).all()):
                position_BT = position_BT[:1]
        distance_BTP = slot_BP[:, None] - position_BT[..., None]
        bucket_BTP = relative_position_bucket(attention, distance_BTP)
        bias: Tensor = attention.relative_attention_bias(bucket_BTP).permute(0, 3, 1, 2)
        return bias


class Seq2SeqTarget(Target):
    """A frozen encoder-decoder LM. `config.num_hidden_layers` is the number of the decoder's
    layers. If the tokenizer has no chat template, a copy of it gets one. Raises UserError for a
    model that this project would run wrongly."""

    reads_pairs = "an encoder-decoder"
    separable = False
    refills = False
    lean_allowed = False

    @classmethod
    def loads(cls, config: Any) -> bool:
        return bool(config.is_encoder_decoder)

    @classmethod
    def auto_class(cls, config: Any) -> Any:
        return AutoModelForSeq2SeqLM

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        revision: str | None = None,
        quantisation: str | None = None,
        *,
        fingerprint: str | None = None,
        checked: bool = True,
    ) -> None:
        """`checked=False` skips the self-check, for the twin that the self-check makes."""
        of_target = model, tokenizer, name, revision, quantisation
        super().__init__(*of_target, fingerprint=fingerprint, checked=False)
        self.config = copy.deepcopy(self.config)
        self.config.num_hidden_layers = len(self.layers)
        if getattr(self.config, "max_position_embeddings", None) is None:
            self.config.max_position_embeddings = UNBOUNDED
        self.head = _with_bias(model)
        if tokenizer is not None and not getattr(tokenizer, "chat_template", None):
            self.tokenizer = copy.deepcopy(tokenizer)
            start = tokenizer.convert_ids_to_tokens(self.seq2seq.start)
            self.tokenizer.chat_template = TEMPLATE % {"eos": tokenizer.eos_token, "start": start}
        if checked:
            self.check()

    def decoder_layers(self) -> nn.ModuleList:
        self.seq2seq = Seq2SeqModel(self.model)
        return self.seq2seq.layers

    def possible_readings(self) -> list[Reading]:
        return [Reading.SLOTS]

    def settle_head(self) -> None:
        """Do nothing: `check` compares the output of the complete model."""

    @property
    def texts_apart(self) -> bool:
        return self.seq2seq.encodes_apart

    @texts_apart.setter
    def texts_apart(self, apart: bool) -> None:
        self.seq2seq.encodes_apart = apart

    def check(self) -> None:
        """Raise UserError unless `logits(final)` equals the model's own output, and unless the
        target's shrunken twin gives transformers' logits beyond every length threshold. Find out
        whether texts of unequal length can be encoded together."""
        twin = twin_check_of(self)  # before a short text has the encoder change its attention
        start, marks = self.seq2seq.start, self._marks
        some = [i for i in range(self.vocab_size) if i != start][:4]
        text_1T = torch.tensor([[*some, *marks, *some]], device=self.device)
        with understood(self), torch.no_grad():
            _, final = self.hidden_states(text_1T, HiddenStateSpec())
            theirs = self.own_logits(text_1T)
            ours = self.logits(final[:, -theirs.shape[1] :])
        require(
            distance(ours, theirs)
            <= (SAME if self.dtype in (torch.float32, torch.float64) else ROUGH),
            f"{self.title} decodes in a way that is not supported: give a T5, T5-v1.1, mT5 or BART",
        )
        if twin is not None and not (twin.texts_right() and twin.cache_right()):
            self.texts_apart = True
            if not (twin.texts_right() and twin.cache_right()):
                raise error_unlike_transformers(self)

    @property
    def _marks(self) -> list[int]:
        """The tokens between the encoder's and the response: the start token, preceded by the
        encoder's eos if the start token is the eos as well."""
        return [self.seq2seq.start] * (2 if self.seq2seq.twice else 1)

    def own_logits(self, ids_BT: Tensor, model: Any = None) -> Tensor:
        """Like `Target.own_logits`, for texts whose decoders start at the same place."""
        model, (start, *_) = self.model if model is None else model, self.seq2seq.starts(ids_BT)
        if model is not self.model:
            for part in model.modules():  # it may have read a short text before
                if hasattr(part, "set_attention_type"):
                    part.set_attention_type(model.config.attention_type)
        parts = {"input_ids": ids_BT[:, :start], "decoder_input_ids": ids_BT[:, start:]}
        logits: Tensor = model(use_cache=False, **parts).logits
        return logits

    def example(self, words: Sequence[int]) -> list[int]:
        """Like `Target.example`; the last few tokens are for the decoder."""
        start, marks = self.seq2seq.start, self._marks
        text = [word if word != start else (start + 1) % self.vocab_size for word in words]
        decoded = max(1, min(len(text) // 4, 9))
        return [*text[: -decoded - len(marks)], *marks, *text[-decoded:]]

    @property
    def depth(self) -> int:
        return len(self.layers)

    def prompt(self, text: str) -> list[int]:
        """The tokens that `decode` continues: the encoder's, then the decoder's start token."""
        ids: list[int] = self.tokenizer(text).input_ids + [self.seq2seq.start]
        return ids

    def prompt_for_decoding(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that `decode` continues, given the encoder's `tokens`. Raises UserError if the
        start token would not be found again."""
        start, twice = self.seq2seq.start, self.seq2seq.twice
        text = [*tokens, start]
        try:
            apart = self.placed(text) == 1
        except UserError:
            apart = False
        ends = "end with the eos and never repeat it in a row" if twice else "not contain it"
        require(
            apart,
            f"the decoder's start token ({start}) is added after the encoder's tokens, which "
            f"must {ends}: give only the encoder's tokens, and mask padding with attention_mask",
        )
        return text

    def placed(self, prompt: Sequence[int]) -> int:
        return len(prompt) - self.seq2seq.starts(torch.tensor([prompt]))[0]

    def new_cache(self, capacity: int | None = None) -> Seq2SeqCache:
        require(
            capacity is None,
            "an encoder-decoder target is not compiled (its prompts have no fixed size): leave "
            "compiled off",
        )
        return self.seq2seq.new_cache()

    def _continued(
        self, ids_BT: Tensor, needs: HiddenStateSpec, cache: SlotCache, parents_BT: Tensor | None
    ) -> PassStates:
        assert isinstance(cache, Seq2SeqCache)
        if not cache.starts:
            return self._read(ids_BT, needs, None, None, cache)
        with self._watched(needs) as seen:
            out_BTD = self.seq2seq.continued(ids_BT, cache, parents_BT)
        return concatenated(seen, needs), out_BTD

    def _read(
        self,
        ids_BT: Tensor,
        needs: HiddenStateSpec,
        position_BT: Tensor | None,
        document_BT: Tensor | None,
        cache: Seq2SeqCache | None = None,
    ) -> PassStates:
        with self._watched(needs) as seen:
            out, split = self.seq2seq.head_input(ids_BT, position_BT, document_BT, cache)
        layers = concatenated(seen, needs)
        return None if layers is None else split.spread(layers), split.spread(out)


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

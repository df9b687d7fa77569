"""An encoder-decoder target (T5, BART), which decodes and trains as a causal one does.

A text is the encoder's tokens, the decoder's start token, and the answer. Everything that works
on texts (the decoder, drafters that copy, teacher forcing) takes it as it is; here it is split
again at the start token: the encoder reads what stands before it once, the decoder the rest.
Positions of the encoder's tokens have no decoder state: features are 0 there.

Letters: B batch, T time, N documents, S encoder time, W decoder time, P slots, H heads, D width.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from specdec.context import Context, Needs
from specdec.errors import UserError, require
from specdec.runtime.cache import Place, SlotCache, model_inputs, size
from specdec.sampling.choose import Processor
from specdec.target.causal import UNBOUNDED, Target, understood

# One turn: what is asked goes to the encoder, the last answer to the decoder.
TEMPLATE = (
    "{%% for m in messages %%}{%% if loop.last and m['role'] == 'assistant' %%}"
    "%(eos)s%(start)s{{ m['content'] }}%(eos)s"
    "{%% else %%}{%% if not loop.first %%}{{ '\n' }}{%% endif %%}{{ m['content'] }}{%% endif %%}"
    "{%% endfor %%}{%% if add_generation_prompt %%}%(eos)s%(start)s{%% endif %%}"
)


class Seq2SeqCache(SlotCache):
    """The decoder's self-attention in slots, and beside it what the encoder gave: its states and
    the cross-attention's keys and values, which stay."""

    def __init__(self, layers: int, capacity: int | None = None) -> None:
        super().__init__(layers, capacity)
        self.starts: list[int] = []  # where each row's decoder starts in its text; []: not read
        self.memory_BSD: Tensor | None = None
        self.memory_mask_BS: Tensor | None = None  # None: no row is padded
        self.cross = DynamicCache()
        self._prefilled = False

    def known(self) -> list[int]:
        """How many tokens of each row's text, the encoder's among them, are committed."""
        return [s + n for s, n in zip(self.starts, self.lengths, strict=True)]

    def keep(self, counts: Sequence[int], path_BK: Tensor | None = None) -> None:
        """As `SlotCache.keep`; the first `counts` are of whole prompts."""
        if not self._prefilled:
            counts = [n - start for n, start in zip(counts, self.starts, strict=True)]
            require(min(counts) > 0, _NO_START)
            self._prefilled = True
        super().keep(counts, path_BK)

    def select(self, rows: Sequence[int]) -> None:
        if self.memory_BSD is None:  # nothing was read yet
            return
        super().select(rows)
        index = torch.tensor(rows, device=self.memory_BSD.device)
        self.starts = [self.starts[b] for b in rows]
        self.memory_BSD = self.memory_BSD[index]
        if self.memory_mask_BS is not None:
            self.memory_mask_BS = self.memory_mask_BS[index]
        self.cross.batch_select_indices(index)


class Split(NamedTuple):
    """Documents of a batch, cut at their start tokens, and where their decoders' tokens stood."""

    encoder_NS: Tensor
    mask_NS: Tensor | None
    decoder_NW: Tensor
    where: tuple[Tensor, Tensor]  # row and position in the batch of every decoder token
    here: tuple[Tensor, Tensor]  # its document and position in `decoder_NW`
    shape: torch.Size  # of the batch
    starts: list[int]

    def spread(self, x_NWD: Tensor) -> Tensor:
        """Back to the batch [B, T, D], 0 where the encoder's tokens are."""
        whole = x_NWD.new_zeros(*self.shape, x_NWD.shape[-1])
        return whole.index_put(self.where, x_NWD[self.here])


class Reader:
    """Reads texts with an encoder-decoder model; its weights are not frozen here.

    The decoder is told where its tokens stand (T5 derives its position biases from the length of
    the cache, BART its positions: neither knows ragged rows, trees or uncommitted tokens), by
    the one method of the model's own that computes them. Raises UserError for a model whose
    positions come from elsewhere.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.encoder, self.decoder = model.get_encoder(), model.get_decoder()
        config, generation = model.config, model.generation_config
        ids = [getattr(c, "decoder_start_token_id", None) for c in (generation, config)]
        self.start: int = next((i for i in ids if i is not None), -1)
        require(self.start >= 0, "the model's config has no decoder_start_token_id: set it")
        eos = generation.eos_token_id if generation.eos_token_id is not None else ()
        self.twice = self.start in (eos if isinstance(eos, list | tuple) else (eos,))
        self._place: Place | None = None  # of the pass at hand; None: the model is run by others
        self._tell_positions()
        self.scale = self._head_scale()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers."""
        return self.decoder.block if hasattr(self.decoder, "block") else self.decoder.layers

    def new_cache(self) -> Seq2SeqCache:
        return Seq2SeqCache(len(self.layers))

    def starts(self, ids_BT: Tensor) -> list[int]:
        """Where the decoder's start token stands in each row. Where it is the eos too (BART), it
        is the one that follows the encoder's eos."""
        found_BT = ids_BT == self.start
        if self.twice:
            found_BT = nn.functional.pad(found_BT[:, 1:] & found_BT[:, :-1], (1, 0))
        first_B = found_BT.int().argmax(-1)
        require(bool((found_BT.any(-1) & (first_B > 0)).all()), _NO_START)
        return first_B.tolist()

    def split(
        self, ids_BT: Tensor, position_BT: Tensor | None = None, document_BT: Tensor | None = None
    ) -> Split:
        """Cut every document at its start token. Documents begin where `position_BT` is 0; those
        that `document_BT` calls padding are left out."""
        T = ids_BT.shape[1]
        spans = []
        for b in range(len(ids_BT)):
            begins = [0] if position_BT is None else (position_BT[b] == 0).nonzero()[:, 0].tolist()
            for begin, end in zip(begins, begins[1:] + [T]):
                if document_BT is None or document_BT[b, begin] >= 0:
                    spans.append((b, begin, end))
        cut = [self.starts(ids_BT[b : b + 1, i:j])[0] for b, i, j in spans]
        N, S, W = len(spans), max(cut), max(j - i - p for (_, i, j), p in zip(spans, cut))
        encoder_NS, decoder_NW = ids_BT.new_zeros(N, S), ids_BT.new_zeros(N, W)
        mask_NS = torch.zeros(N, S, dtype=torch.bool, device=ids_BT.device)
        rows: list[int] = []
        columns: list[int] = []
        documents: list[int] = []
        steps: list[int] = []
        for n, ((b, i, j), p) in enumerate(zip(spans, cut)):
            encoder_NS[n, :p], mask_NS[n, :p] = ids_BT[b, i : i + p], True
            decoder_NW[n, : j - i - p] = ids_BT[b, i + p : j]
            rows += [b] * (j - i - p)
            columns += range(i + p, j)
            documents += [n] * (j - i - p)
            steps += range(j - i - p)
        where, here = (
            (torch.tensor(x, device=ids_BT.device), torch.tensor(y, device=ids_BT.device))
            for x, y in ((rows, columns), (documents, steps))
        )
        mask = None if min(cut) == S else mask_NS
        return Split(encoder_NS, mask, decoder_NW, where, here, ids_BT.shape, cut)

    def read(
        self,
        ids_BT: Tensor,
        cache: Seq2SeqCache | None = None,
        parents_BT: Tensor | None = None,
        position_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What the LM head reads [N, W, D], and the function that puts such states [N, W, D'] in
        their places in the batch [B, T, D'].

        A fresh `cache` takes whole prompts; after that, `ids_BT` are tokens of the decoder that
        continue what it holds, as `Target.features` has it.
        """
        if cache is not None and cache.starts:
            place = cache.place(*size(ids_BT), parents_BT)
            return self._decode(ids_BT, place, cache.memory_BSD, cache.memory_mask_BS, cache), _same
        split = self.split(ids_BT, position_BT, document_BT)
        longest = getattr(self.encoder.config, "max_position_embeddings", None) or UNBOUNDED
        require(
            split.encoder_NS.shape[1] <= longest,
            f"a prompt of {split.encoder_NS.shape[1]} tokens does not fit the {longest} positions "
            "of the encoder: give fewer",
        )
        states_NSD = self.encoder(
            input_ids=split.encoder_NS, attention_mask=split.mask_NS
        ).last_hidden_state
        N, W = split.decoder_NW.shape
        if cache is None:
            place = Place(torch.arange(W, device=ids_BT.device).expand(N, -1))
        else:
            place = cache.place(N, W, ids_BT.device)
            cache.starts = split.starts
            cache.memory_BSD, cache.memory_mask_BS = states_NSD, split.mask_NS
        out = self._decode(split.decoder_NW, place, states_NSD, split.mask_NS, cache)
        return out, split.spread

    def _decode(
        self,
        ids_BT: Tensor,
        place: Place,
        memory_BSD: Tensor | None,
        memory_mask_BS: Tensor | None,
        cache: Seq2SeqCache | None,
    ) -> Tensor:
        if cache is not None and place.mask_BTP is None and any(cache.lengths):
            shape = (*ids_BT.shape, cache.shown)  # one token, which sees all that is there
            whole = torch.ones(shape, dtype=torch.bool, device=ids_BT.device)
            place = place._replace(mask_BTP=whole)
        mask = model_inputs(self.decoder.config, place, self.model.dtype)["attention_mask"]
        self._place = place
        try:
            out_BTD = self.decoder(
                input_ids=ids_BT,
                attention_mask=mask,
                encoder_hidden_states=memory_BSD,
                encoder_attention_mask=memory_mask_BS,
                past_key_values=None if cache is None else EncoderDecoderCache(cache, cache.cross),
                use_cache=cache is not None,
            ).last_hidden_state
        finally:
            self._place = None
        return out_BTD if self.scale == 1 else out_BTD * self.scale

    def _tell_positions(self) -> None:
        biases = [m for m in self.decoder.modules() if hasattr(m, "relative_attention_bias")]
        table = getattr(self.decoder, "embed_positions", None)
        if biases and all(hasattr(m, "compute_bias") for m in biases):
            for attention in biases:
                attention.compute_bias = self._bias_of(attention)
        elif isinstance(table, nn.Embedding):
            table.forward = self._rows_of(table)  # type: ignore[method-assign]
        else:
            raise UserError(
                f"{type(self.model).__name__}: its decoder counts positions in a way that "
                "this class does not know: give a T5, T5-v1.1, mT5 or BART"
            )

    def _bias_of(self, attention: Any) -> Callable[..., Tensor]:
        """T5's `compute_bias`, of the places at hand: [B or 1, H, T, P]."""

        theirs = attention.compute_bias

        def bias(query: int, keys: int, *args: Any, **kwargs: Any) -> Tensor:
            if self._place is None:
                return theirs(query, keys, *args, **kwargs)
            position_BT, slot_BP = self._place.position_BT, self._place.slot_position_BP
            if slot_BP is None:
                slot_BP = torch.arange(keys, device=position_BT.device)[None]
                if len(position_BT) > 1 and bool((position_BT == position_BT[:1]).all()):
                    position_BT = position_BT[:1]
            bucket_BTP = attention._relative_position_bucket(
                slot_BP[:, None] - position_BT[..., None],
                bidirectional=False,
                num_buckets=attention.relative_attention_num_buckets,
                max_distance=attention.relative_attention_max_distance,
            )
            return attention.relative_attention_bias(bucket_BTP).permute(0, 3, 1, 2)

        return bias

    def _rows_of(self, table: nn.Embedding) -> Callable[..., Tensor]:
        """BART's `embed_positions`, of the places at hand. Beyond its end the last row stands in:
        only tokens that are cut off an answer come to lie there."""

        theirs = table.forward

        def rows(*args: Any, **kwargs: Any) -> Tensor:
            if self._place is None:
                return theirs(*args, **kwargs)
            index_BT = self._place.position_BT + getattr(table, "offset", 0)
            return nn.functional.embedding(index_BT.clamp_max(len(table.weight) - 1), table.weight)

        return rows

    @torch.no_grad()
    def _head_scale(self) -> float:
        """What the decoder's output is multiplied by before the head: T5 has width**-0.5, its
        successors 1, and configs of different versions say so in different ways."""
        seen: list[Tensor] = []
        head = self.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        ids = torch.ones(1, 1, dtype=torch.long, device=head.weight.device)
        training = self.model.training
        try:
            out = self.model.eval()(input_ids=ids, decoder_input_ids=ids, output_hidden_states=True)
        finally:
            hook.remove()
            self.model.train(training)
        ratio = float(seen[0].float().norm() / out.decoder_hidden_states[-1].float().norm())
        small = head.weight.shape[1] ** -0.5
        return small if abs(ratio - small) < abs(ratio - 1) else 1.0


class Seq2SeqTarget(Target):
    """A frozen encoder-decoder LM with the surface of `Target`; see the module.

    Chains, trees and ragged batches decode as with a causal target. `config` is the decoder's:
    `num_hidden_layers` counts its layers.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, revision: str | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        kind = f"target {name!r} ({type(model).__name__})"
        with understood(kind):
            self.reader = Reader(model)
        self.layers = self.reader.layers
        self.config = copy.deepcopy(model.config.get_text_config(decoder=True))
        self.config.num_hidden_layers = len(self.layers)
        if getattr(self.config, "max_position_embeddings", None) is None:
            self.config.max_position_embeddings = UNBOUNDED
        self.head = _with_bias(model)
        self.embedding = model.get_input_embeddings()
        self._scale = _same
        if tokenizer is not None and not getattr(tokenizer, "chat_template", None):
            start = tokenizer.convert_ids_to_tokens(self.reader.start)
            tokenizer.chat_template = TEMPLATE % {"eos": tokenizer.eos_token, "start": start}
        with understood(kind):
            self._check_head()

    def prompt(self, text: str) -> list[int]:
        """The tokens that `decode` continues: the encoder's, then the decoder's start token."""
        return self.tokenizer(text).input_ids + [self.reader.start]

    def begun(self, encoder: Sequence[int]) -> list[int]:
        """The tokens that `decode` continues, of those of the encoder. Raises UserError where the
        two cannot be told apart again."""
        text = [*encoder, self.reader.start]
        try:
            (cut,) = self.reader.starts(torch.tensor([text]))
        except UserError:
            cut = -1
        ends = "end with the eos and hold it nowhere twice" if self.reader.twice else "not hold it"
        require(
            cut == len(encoder),
            f"the decoder's start token ({self.reader.start}) comes after the encoder's tokens, "
            f"which must {ends}: give those alone, and mask padding with attention_mask",
        )
        return text

    def placed(self, prompt: Sequence[int]) -> int:
        return len(prompt) - self.reader.starts(torch.tensor([prompt]))[0]

    def shown(self, processors: Sequence[Processor]) -> list[Processor]:
        """The processors, each shown what transformers shows it: the decoder's tokens, from the
        start token on."""

        def of_decoder(processor: Processor) -> Processor:
            def processed(ids_BT: Tensor, scores_BV: Tensor) -> Tensor:
                rows = zip(self.reader.starts(ids_BT), ids_BT, scores_BV)
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
        return self.reader.new_cache()

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
        seen: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for k in needs.layers:
                stack.enter_context(self._hook(k, seen))
            out, spread = self.reader.read(ids_BT, cache, parents_BT, position_BT, document_BT)
        final_BTD = spread(out)
        layers = None
        if needs.layers:
            layers = spread(torch.cat([seen[k] for k in needs.layers], -1))
        final = final_BTD if needs.final_hidden else None
        return Context(ids_BT, layers, final, document_BT, position_BT), final_BTD

    def _check_head(self) -> None:
        """`logits(final)` must be what the model itself returns; else α would be of another p."""
        start = self.reader.start
        some = [i for i in range(self.vocab_size) if i != start][:4]
        encoder = some + [start] * self.reader.twice
        text, asked, answer = (
            torch.tensor([x], device=self.device)
            for x in (encoder + [start] + some, encoder, [start] + some)
        )
        with torch.no_grad():
            _, final = self.features(text, Needs())
            ours = self.logits(final[:, len(encoder) :]).float()
            theirs = self.model(input_ids=asked, decoder_input_ids=answer).logits.float()
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, atol=1e-2, rtol=1e-2):
            raise UserError(
                f"target {self.name!r} ({type(self.model).__name__}) decodes in a way that "
                "this class does not know: give a T5, T5-v1.1, mT5 or BART"
            )


def _with_bias(model: Any) -> nn.Linear:
    """The LM head, and BART's `final_logits_bias` as its bias."""
    head: nn.Linear = model.get_output_embeddings()
    bias = getattr(model, "final_logits_bias", None)
    if bias is None or not bias.any():
        return head
    whole = nn.Linear(head.in_features, head.out_features, device="meta")
    whole.weight = head.weight
    whole.bias = nn.Parameter(bias[0].to(head.weight.dtype), requires_grad=False)
    return whole


def _same(x: Tensor) -> Tensor:
    return x


_NO_START = (
    "the prompt has no decoder start token: give the encoder's tokens and then that token, as "
    "target.prompt(text) does"
)

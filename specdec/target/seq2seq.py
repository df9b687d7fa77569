"""Texts through an encoder-decoder model (T5, BART): a text is cut in two and put together again.

A text is the encoder's tokens, the decoder's start token, and the answer. Whatever works on texts
(the decoder, drafters that copy, teacher forcing) takes it as it is; here it is cut at the start
token: the encoder reads what stands before it once, the decoder reads the rest. The encoder's
tokens have no decoder state: features are 0 there.

Letters: B batch, T time, N documents, S encoder time, W decoder time, P slots, H heads, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from specdec.errors import UserError, require
from specdec.runtime.cache import Place, SlotCache, model_inputs
from specdec.target.parts import UNBOUNDED

NO_START = (
    "the prompt has no decoder start token: give the encoder's tokens and then that token, as "
    "target.prompt(text) does"
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
        """As `SlotCache.known`; the encoder's tokens count."""
        starts = self.starts or [0] * len(self.lengths)
        return [s + n for s, n in zip(starts, self.lengths, strict=True)]

    def keep(self, counts: Sequence[int], path_BK: Tensor | None = None) -> None:
        """As `SlotCache.keep`; the first `counts` are of whole prompts."""
        if not self._prefilled:
            counts = [n - start for n, start in zip(counts, self.starts, strict=True)]
            require(min(counts) > 0, NO_START)
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


class Seq2SeqModel:
    """An encoder-decoder model that is run over texts; its weights are not frozen here.

    While it runs, hooks tell the decoder where its tokens stand: T5 derives its position biases
    from the length of the cache, BART its positions, and neither knows ragged rows, trees or
    tokens that are not committed yet. Between runs the model is as it was. Raises UserError for a
    model whose positions come from elsewhere.
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
        self._biased = [m for m in self.decoder.modules() if hasattr(m, "relative_attention_bias")]
        self._table = getattr(self.decoder, "embed_positions", None)
        if not (
            all(hasattr(m, "compute_bias") for m in self._biased)
            if self._biased
            else isinstance(self._table, nn.Embedding)
        ):
            raise UserError(
                f"{type(model).__name__} counts its decoder's positions in a way that is not read "
                "here: give a T5, T5-v1.1, mT5 or BART"
            )
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
        require(bool((found_BT.any(-1) & (first_B > 0)).all()), NO_START)
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

    def run(
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
            place = cache.place(ids_BT, parents_BT)
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
            place = cache.place(split.decoder_NW)
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
        with self._standing(place):
            out_BTD = self.decoder(
                input_ids=ids_BT,
                attention_mask=mask,
                encoder_hidden_states=memory_BSD,
                encoder_attention_mask=memory_mask_BS,
                past_key_values=None if cache is None else EncoderDecoderCache(cache, cache.cross),
                use_cache=cache is not None,
            ).last_hidden_state
        return out_BTD if self.scale == 1 else out_BTD * self.scale

    @contextmanager
    def _standing(self, place: Place) -> Iterator[None]:
        """While within, the decoder takes its tokens' positions from `place`."""
        with ExitStack() as stack:
            for attention in self._biased:  # the first layer's, which hands its bias on
                bias = {"position_bias": self._bias(attention, place)}
                stack.enter_context(
                    attention.register_forward_pre_hook(
                        lambda _, args, kwargs, bias=bias: (args, kwargs | bias), with_kwargs=True
                    )
                )
            if not self._biased:
                table = self._table
                assert isinstance(table, nn.Embedding)
                one = {"position_ids": place.position_BT.new_zeros(1)}  # its own may not exist
                rows_BTD = _rows(table, place)
                stack.enter_context(
                    table.register_forward_pre_hook(
                        lambda _, args, kwargs: (args, kwargs | one), with_kwargs=True
                    )
                )
                stack.enter_context(table.register_forward_hook(lambda *_: rows_BTD))
            yield

    def _bias(self, attention: Any, place: Place) -> Tensor:
        """T5's position bias [B or 1, H, T, P] of the tokens that stand at `place`."""
        position_BT, slot_BP = place.position_BT, place.slot_position_BP
        if slot_BP is None:
            keys = position_BT.shape[1] if place.mask_BTP is None else place.mask_BTP.shape[2]
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


def _rows(table: nn.Embedding, place: Place) -> Tensor:
    """BART's position embeddings [B, T, D] at `place`. Beyond the table's end its last row stands
    in: only tokens that are cut off an answer come to stand there."""
    index_BT = place.position_BT + getattr(table, "offset", 0)
    return nn.functional.embedding(index_BT.clamp_max(len(table.weight) - 1), table.weight)


def _same(x: Tensor) -> Tensor:
    return x

"""`speculative_generate`: the decoder behind a transformers-style call.

    result = speculative_generate(target, drafter, **tokenizer(texts, return_tensors="pt"),
                                  generation_config=GenerationConfig(max_new_tokens=64))
    result.sequences, result.tau

Letters: B batch, T time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as warpers

from specdec.choose import Processor
from specdec.decode import Generation, Round, decode
from specdec.drafters.base import Drafter
from specdec.errors import UserError
from specdec.length import Length
from specdec.sampler import Sampler
from specdec.target import Target
from specdec.trees import Shape

# what a GenerationConfig may ask for that this decoder does not do: (name, the value it may have)
REFUSED = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None,),
    "guidance_scale": (None, 1, 1.0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_lookbehind": (None, 10),
    "return_dict_in_generate": (None, True, False),
}
# processors of transformers by the field that asks for them, and the value that means nothing
PROCESSORS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "repetition_penalty": (1.0, lambda x: warpers.RepetitionPenaltyLogitsProcessor(x)),
    "no_repeat_ngram_size": (0, lambda x: warpers.NoRepeatNGramLogitsProcessor(x)),
    "sequence_bias": (None, lambda x: warpers.SequenceBiasLogitsProcessor(x)),
    "suppress_tokens": (None, lambda x: warpers.SuppressTokensLogitsProcessor(x)),
    "min_p": (None, lambda x: warpers.MinPLogitsWarper(x)),
    "typical_p": (1.0, lambda x: warpers.TypicalLogitsWarper(x)),
    "epsilon_cutoff": (0.0, lambda x: warpers.EpsilonLogitsWarper(x)),
    "eta_cutoff": (0.0, lambda x: warpers.EtaLogitsWarper(x)),
}
SAMPLED = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")  # only read when sampling


@dataclass
class Speculation:
    """What a call returned: prompts and answers as transformers lays them out, and statistics."""

    sequences: Tensor  # [B, T], padded on the right with the pad token
    generations: list[Generation]

    @property
    def tau(self) -> float:
        """Tokens a target pass, pooled over the rows."""
        passes = sum(len(g.rounds) for g in self.generations)
        return sum(g.emitted for g in self.generations) / max(1, passes)

    @property
    def accepted_lengths(self) -> list[int]:
        """How many rounds accepted 0, 1, 2, … drafted tokens."""
        kept = [r.accepted for g in self.generations for r in g.rounds]
        return [kept.count(n) for n in range(max(kept, default=0) + 1)]


def speculative_generate(
    target: Target,
    drafter: Drafter | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    shape: Shape | None = None,
    rule: str = "auto",
    length: Length | None = None,
    logits_processor: Sequence[Processor] = (),
    seed: int = 0,
    compiled: bool = False,
    streamer: Callable[[int, list[int], Round | None], None] | None = None,
    **overrides: Any,
) -> Speculation:
    """Continue `input_ids` [B, T] (padding masked by `attention_mask`, on either side).

    Reads `generation_config` (None: the target's own) with `overrides` of its fields:
    max_new_tokens or max_length, do_sample, temperature, top_k, top_p, min_p, typical_p, cutoffs,
    repetition_penalty, no_repeat_ngram_size, bad_words_ids, sequence_bias, suppress_tokens,
    min_new_tokens, eos_token_id, pad_token_id, stop_strings. The processors are applied to p and
    q alike, so the output is what the target alone would give: token for token if greedy, in
    distribution if sampled. `streamer(row, ids, round)` gets each round's tokens.

    Raises UserError for a field that this decoder does not do, such as num_beams.
    """
    base = generation_config or target.model.generation_config
    try:
        config = GenerationConfig(**{**base.to_dict(), **overrides})
    except ValueError as error:
        raise UserError(f"generation_config: {str(error).splitlines()[0]}") from error
    for name, allowed in REFUSED.items():
        value = getattr(config, name, None)
        if value not in allowed:
            raise UserError(f"generation_config.{name}={value} is not supported: leave it out")
    prompts = _unpadded(input_ids, attention_mask)
    eos = _ids(config.eos_token_id) or target.eos
    stop = config.stop_strings or ()
    done = decode(
        target,
        prompts,
        max_new_tokens=_limit(config, prompts),
        drafter=drafter,
        shape=shape,
        sampler=_sampler(config),
        rule=rule,
        length=length,
        eos=eos,
        stop=[stop] if isinstance(stop, str) else stop,
        processors=[*logits_processor, *_processors(config, eos, prompts)],
        seeds=range(seed, seed + len(prompts)),
        compiled=compiled,
        on_tokens=streamer,
    )
    pad = config.pad_token_id if config.pad_token_id is not None else (eos or (0,))[0]
    rows = [g.prompt + g.ids for g in done]
    sequences = torch.full((len(rows), max(map(len, rows))), pad)
    for b, ids in enumerate(rows):
        sequences[b, : len(ids)] = torch.tensor(ids)
    return Speculation(sequences.to(input_ids.device), done)


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if input_ids.dim() != 2:
        raise UserError(f"input_ids have {input_ids.dim()} dimensions: give [rows, tokens]")
    if attention_mask is None:
        return input_ids.tolist()
    if attention_mask.shape != input_ids.shape:
        raise UserError("attention_mask has another shape than input_ids: give one entry a token")
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def _limit(config: GenerationConfig, prompts: list[list[int]]) -> int:
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    longest = max(map(len, prompts))
    if config.max_length is None or config.max_length <= longest:
        raise UserError("max_new_tokens is missing: give it in generation_config or as an argument")
    return config.max_length - longest


def _sampler(config: GenerationConfig) -> Sampler:
    if not config.do_sample:
        return Sampler(0.0)
    temperature = 1.0 if config.temperature is None else config.temperature
    top_k = 50 if config.top_k is None else config.top_k
    return Sampler(temperature, top_k, 1.0 if config.top_p is None else config.top_p)


def _processors(
    config: GenerationConfig, eos: tuple[int, ...], prompts: list[list[int]]
) -> list[Processor]:
    found = []
    for name, (nothing, make) in PROCESSORS.items():
        value = getattr(config, name, None)
        if value not in (None, nothing) and (config.do_sample or name not in SAMPLED):
            found.append(make(value))
    if words := config.bad_words_ids:
        found.append(warpers.NoBadWordsLogitsProcessor(words, list(eos)))
    least = config.min_new_tokens or 0
    if least:
        if len({len(p) for p in prompts}) > 1:
            raise UserError("min_new_tokens with prompts of unequal length: give them apart")
        found.append(warpers.MinNewTokensLengthLogitsProcessor(len(prompts[0]), least, list(eos)))
    return found


def _ids(value: int | list[int] | Tensor | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(torch.as_tensor(value).reshape(-1).tolist())

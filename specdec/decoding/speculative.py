"""`speculative_generate`: the decoder behind a transformers-style call.

result = speculative_generate(target, drafter, **tokenizer(texts, return_tensors="pt"),
                              generation_config=GenerationConfig(max_new_tokens=64))
result.sequences, result.tau
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, PrefixConstrainedLogitsProcessor

from specdec.compat import generation_defaults, logits_processors
from specdec.decoding.decode import decode
from specdec.decoding.draft_length import Length
from specdec.decoding.generation import Generation, SpeculationStep
from specdec.decoding.way import Way
from specdec.drafters.base import Drafter
from specdec.errors import UserError, first_line, nearest, require
from specdec.sampling.choose import Processor
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Shape
from specdec.targets.target import Target

# warpers that transformers runs after temperature, top-k and top-p or, for top_h, between them
LATE = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# processors that count the tokens before the response, with one number for all rows
COUNTED = (
    "min_length",
    "min_new_tokens",
    "exponential_decay_length_penalty",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
READ = {
    *("max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "stop_strings"),
    *("do_sample", "temperature", "top_k", "top_p", *LATE, *COUNTED),
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias"),
    *("suppress_tokens", "remove_invalid_values", "renormalize_logits"),
}
# fields about cost, the scoring of beams and transformers' own drafts: no token depends on them
HARMLESS = {
    *("use_cache", "cache_implementation", "max_cache_len", "low_memory", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    *("early_stopping", "length_penalty", "return_dict_in_generate"),
    *("bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "is_assistant"),
}
# values other than None and False that have no effect
NEUTRAL = generation_defaults()
NEUTRAL |= {"min_new_tokens": 0, "min_p": 0.0, "penalty_alpha": 0.0, "guidance_scale": 1.0}


@dataclass
class Speculation:
    """Prompts and responses in transformers' layout, and statistics."""

    sequences: Tensor  # [B, T], padded on the right with the pad token
    generations: list[Generation]

    @property
    def tau(self) -> float:
        """Tokens per target pass, pooled over the rows; nan if all tokens came from prefill."""
        passes = sum(len(g.steps) for g in self.generations)
        return sum(g.emitted for g in self.generations) / passes if passes else math.nan

    @property
    def accepted_lengths(self) -> list[int]:
        """The number of speculation steps that accepted 0, 1, 2, … drafted tokens."""
        kept = [r.accepted for g in self.generations for r in g.steps]
        return [kept.count(n) for n in range(max(kept, default=0) + 1)]


def speculative_generate(
    target: Target,
    drafter: Drafter | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    shape: Shape | None = None,
    verification: str = "auto",
    draft_length: Length | None = None,
    logits_processor: Sequence[Processor] = (),
    seed: int = 0,
    compiled: bool = False,
    streamer: Callable[[int, list[int], SpeculationStep | None], None] | None = None,
    **overrides: Any,
) -> Speculation:
    """Continue `input_ids` [B, T] as the target's `generate` would: token for token if greedy, in
    distribution if sampled. `attention_mask` marks padding, which may be on either side. Without a
    mask, the pad token is padding unless it is an eos, as in transformers.

    For an encoder-decoder, `input_ids` are the encoder's tokens, and only the response is returned,
    beginning with the decoder's start token. Limits, eos, stop strings, sampling and processors
    come from `overrides`, then `generation_config`, then the target's own config. The caller's
    `logits_processor` run after the penalties and before temperature, one row at a time. `streamer`
    is the `on_tokens` of `decode`. Raises UserError for a field that is not supported.
    """
    config = _config(target, generation_config, overrides)
    require(
        streamer is None or callable(streamer),
        "streamer: give a function (row, ids, speculation step)",
    )
    eos_ids, pad = _ids(config.eos_token_id), config.pad_token_id
    eos = eos_ids or (() if "eos_token_id" in overrides else target.eos)
    if attention_mask is None and pad is not None and pad not in (eos_ids or target.eos):
        attention_mask = input_ids != pad
    prompts = _unpadded(input_ids, attention_mask)
    prompts = [*map(target.prompt_for_decoding, prompts)]
    # tokens that transformers' processors do not see: those that an encoder reads
    hidden = [len(prompt) - target.placed(prompt) for prompt in prompts]
    start = config.decoder_start_token_id
    for prompt, n in zip(prompts, hidden, strict=True):
        if n > 0 and start not in (None, prompt[n]):
            raise UserError(
                f"generation_config.decoder_start_token_id={start} is not the {prompt[n]} that the "
                "target was loaded with: set it in the model's config"
            )
    seen = [len(p) - n for p, n in zip(prompts, hidden, strict=True)]
    limit = config.max_new_tokens
    if limit is None:
        limit = (config.max_length or 0) - max(seen)
        require(limit > 0, "max_new_tokens is missing or max_length too short: give max_new_tokens")
    processors = _processors(config, target, eos, seen, limit, logits_processor)
    stop = config.stop_strings or ()
    sampler = Sampler(1.0 if config.do_sample else 0.0)
    if config.do_sample and not _late(config):  # otherwise the processors apply these
        sampler = Sampler(config.temperature, config.top_k, config.top_p)
    done = decode(
        target,
        prompts,
        Way(
            drafter,
            shape,
            sampler=sampler,
            verification=verification,
            draft_length=draft_length,
            compiled=compiled,
        ),
        max_new_tokens=limit,
        eos=eos,
        stop=[stop] if isinstance(stop, str) else stop,
        processors=processors,
        seeds=[((seed << 20) + b) % (1 << 63) for b in range(len(prompts))],  # all different
        on_tokens=streamer,
    )
    if pad is None:
        pad = next((i for i in eos if i >= 0), 0)
    texts = [torch.tensor(g.prompt[n:] + g.ids) for n, g in zip(hidden, done, strict=True)]
    sequences = pad_sequence(texts, batch_first=True, padding_value=pad)
    return Speculation(sequences.to(input_ids.device), done)


def _config(
    target: Target, generation_config: GenerationConfig | None, overrides: dict[str, Any]
) -> GenerationConfig:
    """The fields, merged as in `generate`: overrides, `generation_config`, then
    the target's own."""
    config = copy.deepcopy(generation_config or GenerationConfig())
    fields = vars(GenerationConfig())
    with transformers_errors():
        config.update(**target.model.generation_config.to_dict(), defaults_only=True)
        unknown = config.update(**overrides)
        config.update(temperature=1.0, top_k=50, top_p=1.0, defaults_only=True)
    for name in unknown:
        raise UserError(f"generation_config.{name} is unknown{nearest(name, fields)}")
    for name in fields:
        if name not in READ | HARMLESS and _asks(config, name):
            beams = " or call specdec.lab.decoding.beam.beam_search" * (name == "num_beams")
            said = f"{name}={getattr(config, name)} is not supported: leave it out{beams}"
            raise UserError(f"generation_config.{said}")
    return config


@contextmanager
def transformers_errors() -> Iterator[None]:
    """Turn transformers' error about a wrong value into a UserError."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"generation_config: {first_line(error)}") from error


def _asks(config: GenerationConfig, name: str) -> bool:
    """Whether the field of the generation config has an effect."""
    value = getattr(config, name, None)
    return value is not None and value is not False and value != NEUTRAL.get(name)


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    shape = list(input_ids.shape)
    rows = len(shape) == 2 and shape[0] > 0
    require(rows, f"input_ids have the shape {shape}: give [rows, tokens]")
    if attention_mask is None:
        return input_ids.tolist()
    alike = attention_mask.shape == input_ids.shape
    require(alike, "attention_mask and input_ids differ in shape: give one entry for each token")
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def _late(config: GenerationConfig) -> bool:
    """Whether the config requests a warper that must run after temperature, top-k and top-p."""
    return bool(config.do_sample) and any(_asks(config, name) for name in LATE)


def _processors(
    config: GenerationConfig,
    target: Target,
    eos: tuple[int, ...],
    seen: list[int],
    limit: int,
    of_user: Sequence[Processor],
) -> list[Processor]:
    """The processors that `generate` would run, made by its own function. Warpers are included only
    if the `Sampler`, which is faster and keeps the draft vocabulary pruned, cannot do the same.
    `seen` is the number of tokens before each row's response, `limit` the maximum of response
    tokens."""
    require(
        len(seen) == 1 or not any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in of_user),
        "PrefixConstrainedLogitsProcessor needs the number of the row in the batch, but each row "
        "is processed on its own here: give one prompt at a time",
    )
    size = target.vocab_size
    for name, ids in _named(config):
        known = all(0 <= i < size for i in ids)
        require(known, f"generation_config.{name} names tokens outside 0 to {size - 1}")
    for name in COUNTED:
        require(
            len(set(seen)) == 1 or not _asks(config, name),
            f"generation_config.{name} needs prompts of equal length: give one prompt at a time",
        )
    require(
        bool(eos) or not _asks(config, "exponential_decay_length_penalty"),
        "generation_config.exponential_decay_length_penalty needs an eos token: give eos_token_id",
    )
    config = copy.deepcopy(config)
    config.do_sample, config.max_length = _late(config), seen[0] + limit
    eos_ids = torch.tensor(eos, device=target.device) if eos else None
    own = {"logits_processor": LogitsProcessorList(of_user), "device": str(target.device)}
    with transformers_errors():
        return list(logits_processors(target.model, config, eos_ids, seen[0], **own))


def _named(config: GenerationConfig) -> Iterator[tuple[str, Sequence[int]]]:
    """The config's fields that name tokens for processors, and those tokens."""
    forced = ("forced_bos_token_id", "forced_eos_token_id")
    for name in ("suppress_tokens", "begin_suppress_tokens", *forced):
        yield name, _ids(getattr(config, name))
    yield "bad_words_ids", list(chain(*(config.bad_words_ids or ())))
    biased = config.sequence_bias or ()  # a dict by words, or pairs of a word and its bias
    words = [x[0] for x in biased] if isinstance(biased, list) else biased
    yield "sequence_bias", list(chain(*words))


def _ids(value: int | list[int] | Tensor | None) -> tuple[int, ...]:
    return () if value is None else tuple(torch.as_tensor(value).reshape(-1).tolist())

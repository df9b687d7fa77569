"""`speculative_generate`: the decoder behind a transformers-style call.

    result = speculative_generate(target, drafter, **tokenizer(texts, return_tensors="pt"),
                                  generation_config=GenerationConfig(max_new_tokens=64))
    result.sequences, result.tau

Letters: B batch, T time.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
)

from specdec.decoding.answers import Generation, Round
from specdec.decoding.decode import decode
from specdec.decoding.length import Length
from specdec.drafters.base import Drafter
from specdec.errors import UserError, nearest, require
from specdec.sampling.choose import Processor
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Shape
from specdec.target.base import Target
from specdec.target.encoder_decoder import Seq2SeqTarget

# warpers that transformers runs after temperature, top-k and top-p, or (top_h) between them
LATE = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# processors that count the tokens before the answer, which is one number for all rows
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
# what generation costs, how beams are scored, how transformers drafts: no token depends on them
HARMLESS = {
    *("use_cache", "cache_implementation", "max_cache_len", "low_memory", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    *("early_stopping", "length_penalty", "return_dict_in_generate"),
    *("bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "is_assistant"),
}
# for some fields, a value other than None and False that asks for nothing
NEUTRAL: dict[str, float] = {
    "min_length": 0,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
}


@dataclass
class Speculation:
    """What `speculative_generate` returns: prompts and answers laid out as in transformers, and
    statistics."""

    sequences: Tensor  # [B, T], padded on the right with the pad token
    generations: list[Generation]

    @property
    def tau(self) -> float:
        """Tokens per target pass, pooled over the rows; nan where prefill gave all of them."""
        passes = sum(len(g.rounds) for g in self.generations)
        return sum(g.emitted for g in self.generations) / passes if passes else math.nan

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
    """Continue `input_ids` [B, T], whose padding, on either side, `attention_mask` marks. Without a
    mask the pad token is padding unless it is an eos, as in transformers.

    For a `Seq2SeqTarget` they are the encoder's tokens, and only the answer comes back, beginning
    with the decoder's start token. Limits, eos, stop strings, sampling, penalties and the other
    processors are those of `generation_config`, with `overrides` of its fields, and for fields
    that it leaves open those of the target's own. The processors run in transformers' order;
    `logits_processor`, the caller's, come after the penalties and before temperature, and each
    sees one row at a time. All are applied to p and q alike, so that the output is what `generate`
    of the target would give: token for token if greedy, in distribution if sampled. `streamer` is
    the `on_tokens` of `decode`.

    Raises UserError for a field that this decoder does not support (those in neither READ nor
    HARMLESS).
    """
    config = _config(target, generation_config, overrides)
    require(streamer is None or callable(streamer), "streamer: give a function (row, ids, round)")
    if attention_mask is None:
        attention_mask = _inferred(input_ids, config, target)
    rows = _unpadded(input_ids, attention_mask)
    prompts, hidden = rows, [0] * len(rows)  # tokens that transformers' processors do not see
    if isinstance(target, Seq2SeqTarget):
        prompts, hidden = [target.begun(ids) for ids in rows], [len(ids) for ids in rows]
    seen = [len(p) - n for p, n in zip(prompts, hidden, strict=True)]
    given = _ids(config.eos_token_id)
    eos = given or (() if "eos_token_id" in overrides else target.eos)
    limit = _limit(config, max(seen))
    processors = _processors(config, target, eos, seen, limit, logits_processor)
    stop = config.stop_strings or ()
    done = decode(
        target,
        prompts,
        max_new_tokens=limit,
        drafter=drafter,
        shape=shape,
        sampler=_sampler(config),
        rule=rule,
        length=length,
        eos=eos,
        stop=[stop] if isinstance(stop, str) else stop,
        processors=processors,
        seeds=[((seed << 20) + b) % (1 << 63) for b in range(len(prompts))],  # no two calls share
        compiled=compiled,
        on_tokens=streamer,
    )
    pad = config.pad_token_id
    if pad is None:
        pad = next((i for i in eos if i >= 0), 0)
    texts = [g.prompt[n:] + g.ids for n, g in zip(hidden, done, strict=True)]
    sequences = torch.full((len(texts), max(map(len, texts))), pad)
    for b, ids in enumerate(texts):
        sequences[b, : len(ids)] = torch.tensor(ids)
    return Speculation(sequences.to(input_ids.device), done)


def _config(
    target: Target, given: GenerationConfig | None, overrides: dict[str, Any]
) -> GenerationConfig:
    """The fields as `generate` merges them: overrides, what is given, the target's own."""
    own = target.model.generation_config
    config = copy.deepcopy(given) if given is not None else GenerationConfig()
    try:
        config.update(**own.to_dict(), defaults_only=True)
        unknown = config.update(**overrides)
    except ValueError as error:
        raise UserError(f"generation_config: {str(error).splitlines()[0]}") from error
    fields = vars(GenerationConfig())
    for name in unknown:
        raise UserError(f"generation_config.{name} is unknown{nearest(name, fields)}")
    if _asks(config, "num_beams"):
        raise UserError(
            f"generation_config.num_beams={config.num_beams} is not supported here: call "
            "specdec.decoding.beam.beam_search, or give num_beams=1"
        )
    for name in fields:
        if name not in READ | HARMLESS and _asks(config, name):
            value = getattr(config, name)
            raise UserError(f"generation_config.{name}={value} is not supported: leave it out")
    start = config.decoder_start_token_id
    if isinstance(target, Seq2SeqTarget) and start not in (None, target.seq2seq.start):
        raise UserError(
            f"generation_config.decoder_start_token_id={start} is not the {target.seq2seq.start} "
            "that the target was loaded with: set it in the model's config"
        )
    return config


def _asks(config: GenerationConfig, name: str) -> bool:
    """Whether the field asks for something."""
    value = getattr(config, name, None)
    return value is not None and value is not False and value != NEUTRAL.get(name)


def _inferred(input_ids: Tensor, config: GenerationConfig, target: Target) -> Tensor | None:
    """Padding where no mask tells it, by transformers' rule."""
    pad, eos = config.pad_token_id, _ids(config.eos_token_id) or target.eos
    return None if pad is None or pad in eos else input_ids != pad


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if input_ids.dim() != 2 or not len(input_ids):
        raise UserError(f"input_ids have the shape {list(input_ids.shape)}: give [rows, tokens]")
    if attention_mask is None:
        return input_ids.tolist()
    if attention_mask.shape != input_ids.shape:
        raise UserError("attention_mask has another shape than input_ids: give one entry a token")
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def _limit(config: GenerationConfig, longest: int) -> int:
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if config.max_length is None or config.max_length <= longest:
        raise UserError("max_new_tokens is missing: give it in generation_config or as an argument")
    return config.max_length - longest


def _late(config: GenerationConfig) -> bool:
    """Whether a warper is asked for that must see what temperature, top-k and top-p leave."""
    return bool(config.do_sample) and any(_asks(config, name) for name in LATE)


def _sampler(config: GenerationConfig) -> Sampler:
    if not config.do_sample:
        return Sampler(0.0)
    if _late(config):
        return Sampler(1.0)  # the processors warp
    temperature = 1.0 if config.temperature is None else config.temperature
    top_k = 50 if config.top_k is None else config.top_k
    return Sampler(temperature, top_k, 1.0 if config.top_p is None else config.top_p)


def _processors(
    config: GenerationConfig,
    target: Target,
    eos: tuple[int, ...],
    seen: list[int],
    limit: int,
    given: Sequence[Processor],
) -> list[Processor]:
    """The processors that `generate` would run, made by its own function. Its warpers are among
    them only where the `Sampler` cannot do all that they do, since it is quicker and keeps a
    draft's vocabulary pruned. `seen` counts the tokens before each row's answer, `limit` those of
    the answer."""
    require(
        len(seen) == 1 or not any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in given),
        "PrefixConstrainedLogitsProcessor depends on the number of the row, and each row is "
        "processed by itself here: give one prompt at a time",
    )
    for name, ids in _named(config):
        require(
            all(0 <= i < target.vocab_size for i in ids),
            f"generation_config.{name} names tokens that the target's {target.vocab_size} do not "
            "include",
        )
    for name in COUNTED:
        if len(set(seen)) > 1 and _asks(config, name):
            raise UserError(
                f"generation_config.{name} with prompts of unequal length: give them one at a time"
            )
    require(
        bool(eos) or not _asks(config, "exponential_decay_length_penalty"),
        "generation_config.exponential_decay_length_penalty needs an eos token: give eos_token_id",
    )
    config = copy.deepcopy(config)
    config.do_sample = _late(config)
    config.top_k = 50 if config.top_k is None else config.top_k
    config.max_length = seen[0] + limit
    config._eos_token_tensor = torch.tensor(eos, device=target.device) if eos else None
    try:
        return list(
            target.model._get_logits_processor(
                config,
                input_ids_seq_length=seen[0],
                logits_processor=LogitsProcessorList(given),
                device=str(target.device),
            )
        )
    except ValueError as error:
        raise UserError(f"generation_config: {str(error).splitlines()[0]}") from error


def _named(config: GenerationConfig) -> Iterator[tuple[str, Sequence[int]]]:
    """The tokens that fields of the config name, apart from eos and padding."""
    for name in ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id"):
        yield name, _ids(getattr(config, name))
    yield "forced_eos_token_id", _ids(config.forced_eos_token_id)
    for name in ("bad_words_ids", "sequence_bias"):
        given = getattr(config, name) or ()
        words = [x[0] for x in given] if name == "sequence_bias" and type(given) is list else given
        yield name, [i for word in words for i in word]


def _ids(value: int | list[int] | Tensor | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(torch.as_tensor(value).reshape(-1).tolist())

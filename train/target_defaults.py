"""Settings that depend on the target if they are null: the maximum lengths of documents, prompts
and responses, and the sampling of responses.

`with_target_defaults` is the one place that fills them in. A run does so once, when it begins
(`train.continued.settled`), and records the numbers in its config.json; `plan=true` and
`scripts/doctor` fill in the same ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from specdec.errors import UserError, first_line
from specdec.targets.adapter import tokenizer_source
from specdec.targets.gguf import model_path
from specdec.targets.target_config import TargetConfig
from train.data.conversations import THINKING_ARGUMENTS, DataConfig
from train.data.rendering import own_chat_template
from train.run_config import Config

# Tokens of a document where neither the target nor the settings give fewer. SpecForge's examples
# train at 4,096 to 8,192; speculators' at 8,192, for Qwen3 with reasoning
LONGEST, LONGEST_THINKING = 4096, 8192
# maximum share of the prompt in a document; reasoning is longer than its prompt
PROMPT, PROMPT_THINKING = 1 / 2, 1 / 4
LENGTHS = {"data": ("max_length", "max_prompt"), "responses": ("max_new_tokens",)}
SAMPLING = ("temperature", "top_p", "top_k")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# fields of a generation config that change p, which drafts are trained and verified without
UNREAD = {"min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


@dataclass(frozen=True)
class TargetLengths:
    """The lengths in the target's files. `positions` is the maximum number of tokens of a text;
    None: no limit, or not known. `thinks` is whether its chat template has a place for
    reasoning."""

    positions: int | None = None
    thinks: bool = False


@dataclass(frozen=True)
class ServedSampling:
    """A server's default sampling from the target, by its generation_config.json. `source`
    describes where the values are from, and which are not applied."""

    temperature: float
    top_p: float
    top_k: int
    source: str


def with_target_defaults(
    cfg: Config, began: Mapping[str, Any] | None = None
) -> tuple[Config, list[str]]:
    """The configuration with numbers for its lengths and its sampling of responses, and notes for
    the user about them. Given settings are kept. `began` is the config.json of the run that is
    continued, which keeps its own. Raises UserError if `target.path` names no file or package."""
    for group, names in {**LENGTHS, "responses": (*LENGTHS["responses"], *SAMPLING)}.items():
        known, settings = (began or {}).get(group) or {}, getattr(cfg, group)
        kept = {n: known[n] for n in names if getattr(settings, n) is None and n in known}
        cfg = replace(cfg, **{group: replace(settings, **kept)})
    if None in (cfg.data.max_length, cfg.data.max_prompt, cfg.responses.max_new_tokens):
        cfg = _with_lengths(cfg, lengths_of_target(cfg.target, cfg.data))
    said = [
        f"lengths: documents of at most {cfg.data.longest_document:,} tokens (data.max_length), "
        f"prompts of {cfg.data.longest_prompt:,} (data.max_prompt)"
    ]
    responses, source = cfg.responses, "as the settings say"
    explicit = [name for name in SAMPLING if getattr(responses, name) is not None]
    if cfg.data.responses == "target":
        said[0] += f", responses of {responses.longest_response:,} (responses.max_new_tokens)"
    if len(explicit) < len(SAMPLING):
        served = served_sampling(cfg.target)
        filled = {name: getattr(served, name) for name in SAMPLING if name not in explicit}
        if responses.temperature == 0:
            filled |= {"top_p": 1.0, "top_k": 0}  # they have no effect; one name in the cache
            filled = {name: value for name, value in filled.items() if name not in explicit}
        else:
            source = served.source
            if explicit:
                source += f", but {', '.join(f'responses.{name}' for name in explicit)} as given"
        responses = replace(responses, **filled)
        cfg = replace(cfg, responses=responses)
    if cfg.data.responses == "target":
        said.append(f"responses: {responses.sampling}, {source}")
    return cfg, said


def _with_lengths(cfg: Config, target: TargetLengths) -> Config:
    """The configuration with lengths for those that are null. The document is as long as the target
    allows, up to `LONGEST`, or as the given lengths need; its prompt takes a share of it, and the
    response the rest."""
    data, new = cfg.data, cfg.responses.max_new_tokens
    responds, positions = data.responses == "target", target.positions
    longest, share = LONGEST, PROMPT
    if target.thinks:
        longest, share = LONGEST_THINKING, PROMPT_THINKING
    if not responds:
        new = None  # no responses are generated
    length, prompt = data.max_length, data.max_prompt
    if length is None:
        if prompt is not None:
            longest = max(longest, prompt + new if new is not None else int(prompt / share))
        elif new is not None:
            longest = max(longest, int(longest * share) + new)
        length = min(longest, positions or longest)
    if prompt is None:
        prompt = length - new if new is not None and new < length else int(length * share)
        # a prompt that is measured needs room for what is decoded
        room = (positions or 2 * length) - cfg.decode.max_new_tokens
        prompt = max(1, min(prompt, room) if room > 0 else prompt)
    if cfg.responses.max_new_tokens is None:
        responses = replace(cfg.responses, max_new_tokens=max(1, length - prompt))
    else:
        responses = cfg.responses
    return replace(
        cfg, data=replace(data, max_length=length, max_prompt=prompt), responses=responses
    )


def lengths_of_target(target: TargetConfig, data: DataConfig) -> TargetLengths:
    """The lengths by the target's config.json and by the chat template of its prompts; no weight is
    read. Values that cannot be read are None: loading the target reports the error."""
    path = model_path(target.path, Path(target.cache))
    try:
        config = AutoConfig.from_pretrained(path, **_options(target))
        text = config.get_text_config(decoder=True)
        positions = getattr(text, "max_position_embeddings", None)
    except Exception:  # transformers raises errors of many classes
        positions = None
    asked = [data.template_args.get(name) for name in THINKING_ARGUMENTS]
    if data.thinking == "off" or False in asked:
        return TargetLengths(positions or None)
    template = own_chat_template(data)
    if template is None:
        template = str(getattr(tokenizer_of(target), "chat_template", None) or "")
    return TargetLengths(positions or None, thinks="think" in template.lower())


def served_sampling(target: TargetConfig) -> ServedSampling:
    """The default sampling of the target's servers. Engines treat top-p and top-k as off if the
    file does not have them. Without a file, or with do_sample=false, decoding is greedy. Raises
    UserError if there may be a file that cannot be read, such as on a hub that does not answer."""
    path = model_path(target.path, Path(target.cache))
    name = "the target's generation_config.json"
    options: dict[str, Any] = {"revision": target.revision} if target.revision else {}
    try:
        file = cached_file(
            path, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **options
        )
        config = None if file is None else GenerationConfig.from_pretrained(path, **options)
    except Exception as error:  # transformers raises errors of many classes
        raise UserError(
            f"target.path={target.path!r}: its generation_config.json cannot be read "
            f"({first_line(error)}): connect to the hub, or give responses.temperature, "
            "responses.top_p and responses.top_k"
        ) from error
    if config is None:
        return ServedSampling(0.0, 1.0, 0, "as the target has no generation_config.json")
    named: dict[str, Any] = {n: getattr(config, n, None) for n in SAMPLING}
    sampled = config.do_sample
    if sampled is None:  # engines sample by a temperature alone
        sampled = named["temperature"] is not None
    if not sampled or named["temperature"] == 0:
        return ServedSampling(0.0, 1.0, 0, f"as {name} does not sample")
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    values |= {n: value for n, value in named.items() if value is not None}
    other = {n: getattr(config, n, None) for n in UNREAD}
    skipped = [f"{n}={x:g}" for n, x in other.items() if x is not None and x != UNREAD[n]]
    source = f"as {name} says" + (f" (not applied: {', '.join(skipped)})" if skipped else "")
    return ServedSampling(
        float(values["temperature"]), float(values["top_p"]), max(0, int(values["top_k"])), source
    )


def tokenizer_of(target: TargetConfig) -> Any:
    """The target's tokenizer; None if there is only a config, from which transformers would make an
    empty one."""
    path = model_path(target.path, Path(target.cache))
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in TOKENIZERS):
        return None
    try:
        return AutoTokenizer.from_pretrained(tokenizer_source(target, path), **_options(target))
    except Exception:  # transformers raises errors of many classes for a folder without one
        return None


def _options(target: TargetConfig) -> dict[str, Any]:
    return {"revision": target.revision, "trust_remote_code": target.trust_remote_code}

"""Files of transformers 5 in a form that older readers support too.

Version 5 keeps rotary parameters in one dict and names a tokenizer's class by its backend. Version
4 and tools built on it would use a rotary base of 10,000, and do not know such a class. The files
written here have both forms, and version 5 reads them as before.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig
from transformers.utils import logging

from specdec.files import read_json
from specdec.targets.fingerprint import computing_keys

CONFIG = "config.json"
TOKENIZER = "tokenizer_config.json"
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def with_older_rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    """A config's keys with its rotary parameters in the form of version 4 added, also in nested
    configs."""
    keys = {name: with_older_rope_keys(x) if _is_config(x) else x for name, x in config.items()}
    rope = keys.get("rope_parameters")
    if not isinstance(rope, dict) or not rope:
        return keys
    by_kind = {kind: x for kind, x in rope.items() if isinstance(x, dict)}
    if by_kind and set(by_kind) != {LOCAL, GLOBAL}:
        return keys  # version 4 has no form for it
    whole = by_kind.get(GLOBAL, rope)
    older: dict[str, Any] = {"rope_theta": whole.get("rope_theta")}
    if by_kind:
        older["rope_local_base_freq"] = by_kind[LOCAL].get("rope_theta")
    if whole.get("rope_type", "default") != "default":
        older["rope_scaling"] = dict(whole)
    share = whole.get("partial_rotary_factor")
    if keys.get("model_type") in ("gpt_neox", "gpt_neox_japanese"):  # with names of its own
        older = {"rotary_emb_base": older["rope_theta"], "rotary_pct": share}
    elif share is not None:
        older["partial_rotary_factor"] = share
    return {name: x for name, x in older.items() if x is not None} | keys


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and bool({"model_type", "rope_parameters"} & value.keys())


def rewrite_config(folder: Path, tied: bool) -> None:
    """Add the form of version 4 to the config that version 5 has saved in a folder, as far as
    version 5 still reads the same config, and record whether the weights are tied."""
    file = folder / CONFIG
    saved = read_json(file) | {"tie_word_embeddings": tied}
    file.write_text(json.dumps(saved), encoding="utf-8")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        before = computing_keys(AutoConfig.from_pretrained(folder))
        for form in (with_older_rope_keys(saved), _without_scaling(with_older_rope_keys(saved))):
            file.write_text(json.dumps(form, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            if computing_keys(AutoConfig.from_pretrained(folder)) == before:
                return
    except Exception:  # the code of a model of its own may be elsewhere
        pass
    finally:
        logging.set_verbosity(verbosity)
    file.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _without_scaling(config: dict[str, Any]) -> dict[str, Any]:
    keys = {name: _without_scaling(x) if _is_config(x) else x for name, x in config.items()}
    keys.pop("rope_scaling", None)
    return keys


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer so that version 4 loads it, too."""
    tokenizer.save_pretrained(folder)
    file = folder / TOKENIZER
    if not file.exists():
        return
    keys = read_json(file)
    if keys.get("tokenizer_class") == "TokenizersBackend":
        keys["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(more := keys.get("extra_special_tokens"), list):
        del keys["extra_special_tokens"]
        keys["additional_special_tokens"] = [*keys.get("additional_special_tokens", []), *more]
    file.write_text(
        json.dumps(keys, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def save_model(model: Any, folder: Path, eos: Sequence[int] | None) -> None:
    """Write a model that version 4 reads as well; with `eos`, its generation config ends responses
    at these ids. Version 5 reads a contradictory generation config (a temperature without sampling)
    but does not save it, so it is written separately and unchanged."""
    stops = copy.deepcopy(model.generation_config)
    if eos is not None:
        stops.eos_token_id = list(eos)
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = own
    if stops is not None:
        stops.to_json_file(folder / "generation_config.json", use_diff=True)
    rewrite_config(folder, _is_tied(model))


def _is_tied(model: Any) -> bool:
    """Whether the head has the embedding's own weight."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight

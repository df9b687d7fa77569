"""The tokenizer's keys of a GGUF file, from another GGUF file or from transformers' tokenizer.

llama.cpp tokenizes text with the target's file and never with a draft's, of which it reads how many
tokens there are and which one masks. So a draft's file may hold the tokens alone, while that of a
target must split text as the original does, which only llama.cpp's code for its kind of
pre-tokenizer can do: `tokenizer.ggml.pre` names that code.
"""

import json
from pathlib import Path
from typing import Any

from gguf import TokenType

from specdec.errors import require
from specdec.formats.gguf_file import SUFFIX, TOKENIZER, Keys, tokenizer_keys
from specdec.targets.gguf import gguf_of
from specdec.targets.parts import TargetParts

GGML = f"{TOKENIZER}ggml."
TOKENS, MODEL, MASK = f"{GGML}tokens", f"{GGML}model", f"{GGML}mask_token_id"
TEMPLATE = f"{TOKENIZER}chat_template"
BYTES, PLAIN = "gpt2", "llama"  # models: byte-level BPE; tokens without merges
NUMBERS = r"\p{N}{1,3}"
# a pre-tokenizer's regular expression, but for how it splits numbers
REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + NUMBERS + "|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONVERTER = "convert the target with llama.cpp's convert_hf_to_gguf.py"


def own_gguf(target: TargetParts) -> Path | None:
    """The GGUF file that a target was loaded from, if it was."""
    path = gguf_of(target.name)
    return path if path is not None and path.is_file() else None


def draft_tokenizer(target: TargetParts, copied_from: Path | None = None) -> Keys:
    """The keys for a draft: those of the GGUF file `copied_from` or of the target's own or, without
    either, made of its tokenizer. Raises UserError for a file with another number of tokens."""
    source = copied_from or own_gguf(target)
    if source is None:
        keys = bpe_keys(target) or plain_keys(target)
    else:
        keys = tokenizer_keys(source)
        count = len(keys[TOKENS].value) if TOKENS in keys else 0
        require(
            count == target.vocab_size,
            f"{source} has {count} tokens, but {target.title} has {target.vocab_size}: give a GGUF "
            "file of this target with --tokenizer-from",
        )
    return keys | _own_template(target)


def target_tokenizer(target: TargetParts, copied_from: Path | None = None) -> Keys:
    """The keys for the target's file. Raises UserError as `draft_tokenizer` does, and for a
    tokenizer whose splitting of text is not known to be one of llama.cpp's."""
    if copied_from or own_gguf(target):
        return draft_tokenizer(target, copied_from)
    keys = bpe_keys(target)
    require(
        bool(keys) and keys[f"{GGML}pre"] != "default",
        f"the tokenizer of {target.title} is none of those that are written here: give a GGUF file "
        f"of the same model with --tokenizer-from FILE{SUFFIX}, or {CONVERTER}",
    )
    return keys | _own_template(target)


def bpe_keys(target: TargetParts) -> Keys:
    """The keys of a byte-level BPE tokenizer; empty for a tokenizer of another kind."""
    described = _described(target)
    model = described.get("model") or {}
    if model.get("type") != "BPE" or not model.get("merges") or "ByteLevel" not in str(described):
        return {}
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    pre = {f"{GGML}pre": _splitting(described.get("pre_tokenizer") or {})}
    return {MODEL: BYTES, **pre, f"{GGML}merges": merges, **_tokens(target, described)}


def plain_keys(target: TargetParts) -> Keys:
    """Tokens alone, which no text is split into: of a draft for any other target."""
    return {MODEL: PLAIN, **_tokens(target, _described(target))}


def _described(target: TargetParts) -> dict[str, Any]:
    """The tokenizer.json of a fast tokenizer; empty if the target has none."""
    backend = getattr(target.tokenizer, "backend_tokenizer", None)
    described: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    return described


def _tokens(target: TargetParts, described: dict[str, Any]) -> Keys:
    """The text and type of each row of the embedding, and the ids of special tokens. Rows without a
    token, by which models are padded, are called [PADn], as llama.cpp's converter calls them."""
    tokenizer, V = target.tokenizer, target.vocab_size
    texts: list[str | None] = [None] * V
    for text, i in (tokenizer.get_vocab() if tokenizer is not None else {}).items():
        if i < V:
            texts[i] = text
    kinds = [TokenType.UNUSED if text is None else TokenType.NORMAL for text in texts]
    for token in described.get("added_tokens") or ():
        if token["id"] < V:
            special = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
            kinds[token["id"]] = special
    ids = {
        f"{GGML}{name}_token_id": getattr(tokenizer, f"{stem}_token_id", None)
        for name, stem in {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}.items()
    }
    return {
        TOKENS: [f"[PAD{i}]" if text is None else text for i, text in enumerate(texts)],
        f"{GGML}token_type": [int(kind) for kind in kinds],
        **{key: i for key, i in ids.items() if i is not None and i < V},
        f"{GGML}add_bos_token": _begins_with_bos(tokenizer),
    }


def _begins_with_bos(tokenizer: Any) -> bool:
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def _own_template(target: TargetParts) -> Keys:
    """The chat template that a run was given in place of the tokenizer's, else the tokenizer's if
    the tokenizer's keys come from it."""
    template = getattr(target.tokenizer, "chat_template", None)
    return {TEMPLATE: template} if isinstance(template, str) else {}


def _splitting(pre_tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name (llama-vocab.cpp) of a pre-tokenizer before byte-level BPE; "default" for
    one that is not among these."""
    parts = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    steps = [(part.get("type"), part.get("individual_digits")) for part in parts]
    whole = parts[-1].get("use_regex", True)  # whether ByteLevel splits words as well
    if steps == [("Digits", True), ("ByteLevel", None)] and whole:
        return "smollm"
    if [kind for kind, _ in steps] == ["Split", "ByteLevel"] and not whole:
        regex = (parts[0].get("pattern") or {}).get("Regex")
        names = {REGEX: "llama-bpe", REGEX.replace(NUMBERS, r"\p{N}"): "qwen2"}
        return next((name for known, name in names.items() if known == regex), "default")
    return "default"

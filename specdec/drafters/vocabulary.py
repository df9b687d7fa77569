"""The vocabulary of a draft LM that starts from another model's weights: the target's tokens, in as
many rows as the target's own embedding has.

Makers pad embeddings: the same tokenizer comes with 151,936 rows in one model and with 152,064 in a
larger one, and engines only draft with a model that has exactly the target's rows. Rows beyond the
target's are cut. Where the draft has fewer, rows of zeros are added, and its draft vocabulary ends
before them, so q is 0 there.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils.hub import cached_file

from specdec.errors import UserError, first_line, require
from specdec.targets.parts import TargetParts

# a tokenizer has at least one of these; without any, transformers makes up an empty one
FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
OF_TARGET = ("target", "random")  # sources whose tokenizer is the target's
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def fitted(
    source: str, model: Mapping[str, Any], target: TargetParts
) -> tuple[dict[str, Any], int | None]:
    """The config of a draft's model (`model`, as in `source`) with the target's V rows, and its
    number S of rows if that is less. Raises UserError for a model of another tokenizer or, where
    one of the two has no tokenizer, of another number of rows."""
    V, rows = target.vocab_size, model.get("vocab_size")
    stored = source not in OF_TARGET
    if not isinstance(rows, int) or not (stored and _compared(source, target)):
        require(
            rows == V,
            f"drafter.source={source!r} has vocab_size={rows}, but the target has {V}: give a "
            "model with the target's tokenizer",
        )
        return dict(model), None
    cut: dict[str, Any] = {n: None for n in IDS if isinstance(i := model.get(n), int) and i >= V}
    return {**model, "vocab_size": V, **cut}, rows if rows < V else None


def resize(model: Any, V: int) -> None:
    """Give a model V rows of embedding and head: rows beyond them are cut, missing ones are 0."""
    rows = model.config.vocab_size
    if rows == V:
        return
    model.resize_token_embeddings(V, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[rows:] = 0
            if getattr(layer, "bias", None) is not None:
                layer.bias[rows:] = 0


def _compared(source: str, target: TargetParts) -> bool:
    """Whether the tokenizers of a draft's source and of the target could be compared. Raises
    UserError naming the first id that means another token."""
    if target.tokenizer is None or not any(map(_file(source), FILES)):
        return False
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # whatever the libraries of tokenizers raise
        raise UserError(
            f"drafter.source={source!r}: its tokenizer could not be loaded ({first_line(error)}): "
            "copy or download it again, or give another model"
        ) from error
    ours, theirs = _by_id(tokenizer), _by_id(target.tokenizer)
    both = sorted(ours.keys() & theirs.keys())
    remedy = "give a model with the target's tokenizer, or drafter=translated"
    require(bool(both), f"drafter.source={source!r} has no token of the target's: {remedy}")
    for i in both:
        require(
            not ours[i].isdisjoint(theirs[i]),
            f"drafter.source={source!r} has another tokenizer than the target: token {i} is "
            f"{min(ours[i])!r} there, and {min(theirs[i])!r} in the target: {remedy}",
        )
    return True


def _file(source: str) -> Any:
    """A function that finds a file in a folder or a hub model, or gives None."""
    kinds = ("missing_entries", "connection_errors")
    quiet: Any = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    return lambda name: cached_file(source, name, **quiet)


def _by_id(tokenizer: Any) -> dict[int, set[str]]:
    """The names of each id; a few tokenizers have two names for one."""
    names = defaultdict[int, set[str]](set)
    for name, i in tokenizer.get_vocab().items():
        names[i].add(name)
    return names

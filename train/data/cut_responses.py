"""How many of the target's responses were cut at `answers.max_new_tokens`, in the texts of a run or
in the cache."""

from collections.abc import Collection, Sequence
from pathlib import Path

from specdec.measure.results import CutResponses
from specdec.targets.parts import Parts
from train.data.response_files import AnswersConfig, key_of, name_of, read_answers
from train.data.template import Document, Prompt


def cut_responses(
    documents: Sequence[Document], eos: Collection[int], cfg: AnswersConfig
) -> CutResponses:
    """Of documents that end in the target's response. A response was cut if it has the most tokens
    that it may have, and its last one does not end a response (`eos`)."""
    ids_of = [document.ids[document.mask].tolist() for document in documents]
    return _counted([ids for ids in ids_of if ids], eos, cfg)


def cut_responses_in_cache(
    target: Parts, prompts: Sequence[Prompt], cfg: AnswersConfig
) -> CutResponses | None:
    """Of the responses to these prompts that earlier runs have stored; None if there are none."""
    asked = {name_of(prompt): prompt.ids.tolist() for prompt in prompts}
    key = key_of(target, cfg, bool(cfg.engines))
    folder = Path(cfg.root) / key
    if not folder.is_dir():
        return None
    stored = read_answers(folder, key, target.vocab_size, asked).by_prompt
    known = [stored[name]["ids"] for name in asked if name in stored]
    return _counted(known, target.eos, cfg) if known else None


def _counted(
    responses: Sequence[Sequence[int]], eos: Collection[int], cfg: AnswersConfig
) -> CutResponses:
    most = cfg.max_new_tokens
    cut = sum(len(ids) >= most and ids[-1] not in eos for ids in responses)
    return CutResponses(responses=len(responses), cut=cut, max_new_tokens=most)

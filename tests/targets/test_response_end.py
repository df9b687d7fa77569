"""What ends a response: the generation config, the tokenizer and the chat template together.

Run alone: python -m pytest tests/targets/test_response_end.py (under 10 s)
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.decoding.decode import decode
from specdec.formats.draft_export import _stops
from specdec.targets.loading import load_target, opening
from specdec.targets.response_end import TurnEnds, turn_ends
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.tiny import (
    REPOSITORY,
    SPECIAL,
    TEMPLATE,
    architectures,
    make_tokenizer,
    responding,
    save_target,
)
from train.data.response_files import responses_key

END, START, TEXT_END = (SPECIAL.index(x) for x in ("<|im_end|>", "<|im_start|>", "<|endoftext|>"))
BY_NEXT_ROLE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_ALONE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}"
    "{% if messages[-1]['role'] == 'assistant' %}<|endoftext|>{% endif %}"
)
WORDS = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}"
STRICT = "{{ raise_exception('no') }}"
PARTS = (
    "{% for m in messages %}{{ m['role'] }} {% for p in m['content'] %}{{ p['text'] }}{% endfor %}"
    "<|im_end|>{% endfor %}"
)
STRIPPED = "{% for m in messages %}{{ m['content'] | trim }} \n<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (TEMPLATE, TurnEnds(END, END)),
        (BY_NEXT_ROLE, TurnEnds(None, START)),
        (LAST_ALONE, TurnEnds(TEXT_END, None)),
        (STRIPPED, TurnEnds(END, END)),
        (PARTS, TurnEnds(END, END)),
        (WORDS, TurnEnds(after="\nuser ")),
        (STRICT, TurnEnds()),
        ("{% for m in", TurnEnds()),
        (None, TurnEnds()),
    ],
)
def test_the_end_of_a_turn(template: str | None, ends: TurnEnds) -> None:
    assert turn_ends(make_tokenizer(template)) == ends


def target_with(
    folder: Path, generation: int | list[int], template: str = TEMPLATE
) -> TargetConfig:
    """A target whose generation config ends responses at these ids alone."""
    path = save_target(folder / "model", layers=2, template=template)
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": generation}))
    return TargetConfig(str(path), "float32", "cpu", cache=str(folder / "cache"))


def test_all_three_end_a_response(tmp_path: Path) -> None:
    """Of a target that only writes the end of the template's turn, responses have one token;
    without the template, they would have all eight."""
    cfg = target_with(tmp_path, [TEXT_END], BY_NEXT_ROLE)
    target = load_target(cfg)
    assert (target.generation_eos, target.declared_eos) == ((TEXT_END,), (TEXT_END, END))
    assert target.eos == (TEXT_END, END, START)
    with torch.no_grad():  # every position's logits are largest at one token
        target.head.weight.zero_()
        bias = torch.zeros(target.vocab_size)
        bias[START] = 1
        target.head.bias = torch.nn.Parameter(bias, requires_grad=False)
    (response,) = decode(target, [[5, 6, 7]], max_new_tokens=8)
    assert response.ids == [START]
    target.tokenizer.chat_template = None
    assert target.eos == (TEXT_END, END)
    (response,) = decode(target, [[5, 6, 7]], max_new_tokens=8)
    assert response.ids == 8 * [START]


def test_a_saved_target_and_the_names_of_responses_say_so(tmp_path: Path) -> None:
    """Engines read the generation config. Responses are kept under another name where they could
    end elsewhere."""
    keys = []
    for name, ids in (("short", [TEXT_END]), ("whole", [TEXT_END, END]), ("end", END)):
        target = load_target(target_with(tmp_path / name, ids))
        target.save(tmp_path / name / "saved")
        said = json.loads((tmp_path / name / "saved" / "generation_config.json").read_text())
        assert said["eos_token_id"] == ([TEXT_END, END] if name != "end" else END)
        assert target.model.generation_config.eos_token_id == ids
        keys.append(responses_key(target, responding()))
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(("template", "warned"), [(TEMPLATE, False), (WORDS, True)])
def test_a_template_that_ends_nowhere_is_said(tmp_path: Path, template: str, warned: bool) -> None:
    cfg = target_with(tmp_path, END, template)
    line = opening(load_target(cfg), cfg)
    assert ("responses may run on: its chat template ends them with" in line) == warned
    assert "\n" not in line


CASES = REPOSITORY / "tests" / "train" / "data" / "cases"
HARMONY = (CASES / "template_message_end_is_not_response_end.jinja").read_text()
MARKS = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|final|>")


def harmony(folder: Path, declared: Sequence[str], eos: str, template: str = HARMONY) -> Target:
    """A target with gpt-oss's kind of template, whose files declare these tokens as ends."""
    tokenizer = make_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.eos_token = eos
    model = AutoModelForCausalLM.from_config(architectures(len(tokenizer), layers=1)["llama"])
    ids = tokenizer.convert_tokens_to_ids(list(declared))
    model.generation_config.eos_token_id = ids or None
    model.generation_config.pad_token_id = TEXT_END
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_target(TargetConfig(str(folder), "float32", "cpu"))


def names(target: Target, ids: Sequence[int]) -> list[str]:
    return [str(x) for x in target.tokenizer.convert_ids_to_tokens(list(ids))]


# what the files declare, the tokenizer's eos, a template → all that ends a response, and its end
SAME_END = HARMONY.replace("'<|return|>' if loop.last else '<|end|>'", "'<|end|>'")
DECLARED: list[tuple[Sequence[str], str, str, list[str], str]] = [
    (["<|return|>", "<|call|>"], "<|return|>", HARMONY, ["<|return|>", "<|call|>"], "<|return|>"),
    # no generation config: the tokenizer's eos
    ([], "<|return|>", HARMONY, ["<|return|>"], "<|return|>"),
    # the mark of a message, as the tokenizer's eos, within a response
    (["<|return|>"], "<|end|>", HARMONY, ["<|return|>"], "<|return|>"),
    # the template never writes what is declared, but closes messages within a response
    (["<|return|>"], "<|return|>", SAME_END, ["<|return|>"], "<|return|>"),
    # nothing that is declared closes a response in the template
    (["<|call|>"], "<|call|>", HARMONY, ["<|call|>", "<|return|>"], "<|return|>"),
    (["<|call|>"], "<|call|>", TEMPLATE, ["<|call|>", "<|im_end|>"], "<|im_end|>"),
]


@pytest.mark.parametrize(("declared", "eos", "template", "ends", "end"), DECLARED)
def test_the_mark_of_a_message_does_not_end_a_response(
    tmp_path: Path, declared: Sequence[str], eos: str, template: str, ends: list[str], end: str
) -> None:
    target = harmony(tmp_path, declared, eos, template)
    assert names(target, target.eos) == ends
    assert target.response_end is not None and names(target, [target.response_end]) == [end]
    # an engine, which knows the files alone, is told what they leave out
    unknown = set(ends) - {*declared, eos}
    assert [x in _stops(target) for x in ends] == [False] * len(ends)
    assert bool(_stops(target)) == bool(unknown)


def test_a_harmony_response_runs_to_its_declared_end_as_with_transformers(tmp_path: Path) -> None:
    """A target that writes <|channel|>a<|end|><|final|>cat<|return|>, one token after another."""
    target = harmony(tmp_path, ["<|return|>", "<|call|>"], "<|return|>")
    text = "<|start|>assistant<|channel|>a<|end|><|final|>cat<|return|>a"
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    chain = dict(pairwise(ids))

    embedding = target.embedding.weight
    with torch.no_grad():  # each token's state is its own row of the identity; no layer changes it
        width = embedding.shape[1]
        embedding.zero_()
        for n, before in enumerate(chain):
            embedding[before, n] = 1
        for layer in target.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        head = torch.zeros(target.vocab_size, width)
        for n, after in enumerate(chain.values()):
            head[after, n] = 1
        target.model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    target = type(target)(target.model, target.tokenizer, target.name)
    (response,) = decode(target, [ids[:2]], max_new_tokens=20)
    theirs = target.model.generate(torch.tensor([ids[:2]]), max_new_tokens=20, do_sample=False)
    assert [*ids[:2], *response.ids] == theirs[0].tolist() == ids[:-1]

"""What ends an answer: the generation config, the tokenizer and the chat template together.

Run alone: python -m pytest tests/targets/test_turns.py (under 10 s)
"""

import json
from pathlib import Path

import pytest
import torch

from specdec.decoding.decode import decode
from specdec.targets.loading import TargetConfig, load_target, opening
from specdec.targets.turns import turn_ends
from tests.tiny import SPECIAL, TEMPLATE, make_tokenizer, save_target
from train.data.answer_files import AnswersConfig, key_of

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
STRIPPED = "{% for m in messages %}{{ m['content'] | trim }} \n<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends", "after"),
    [
        (TEMPLATE, {END}, None),
        (BY_NEXT_ROLE, {START}, None),
        (LAST_ALONE, {TEXT_END}, None),
        (STRIPPED, {END}, None),
        (WORDS, set(), "\nuser "),
        (STRICT, set(), None),
        ("{% for m in", set(), None),
        (None, set(), None),
    ],
)
def test_the_end_of_a_turn(template: str | None, ends: set[int], after: str | None) -> None:
    assert turn_ends(make_tokenizer(template)) == (ends, after)


def target_with(
    folder: Path, generation: int | list[int], template: str = TEMPLATE
) -> TargetConfig:
    """A target whose generation config ends answers at these ids alone."""
    path = save_target(folder / "model", layers=2, template=template)
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": generation}))
    return TargetConfig(str(path), "float32", "cpu", cache=str(folder / "cache"))


def test_all_three_end_an_answer(tmp_path: Path) -> None:
    """Of a target that only writes the end of the template's turn, answers have one token; without
    the template, they would have all eight."""
    cfg = target_with(tmp_path, [TEXT_END], BY_NEXT_ROLE)
    target = load_target(cfg)
    assert (target.generation_eos, target.declared_eos) == ((TEXT_END,), (TEXT_END, END))
    assert target.eos == (TEXT_END, END, START)
    with torch.no_grad():  # every position's logits are largest at one token
        target.head.weight.zero_()
        bias = torch.zeros(target.vocab_size)
        bias[START] = 1
        target.head.bias = torch.nn.Parameter(bias, requires_grad=False)
    (answer,) = decode(target, [[5, 6, 7]], max_new_tokens=8)
    assert answer.ids == [START]
    target.tokenizer.chat_template = None
    assert target.eos == (TEXT_END, END)
    (answer,) = decode(target, [[5, 6, 7]], max_new_tokens=8)
    assert answer.ids == 8 * [START]


def test_a_saved_target_and_the_names_of_answers_say_so(tmp_path: Path) -> None:
    """Engines read the generation config. Answers are kept under another name only where they could
    end elsewhere than before."""
    keys = []
    for name, ids in (("short", [TEXT_END]), ("whole", [TEXT_END, END]), ("end", END)):
        target = load_target(target_with(tmp_path / name, ids))
        target.save(tmp_path / name / "saved")
        said = json.loads((tmp_path / name / "saved" / "generation_config.json").read_text())
        assert said["eos_token_id"] == ([TEXT_END, END] if name != "end" else END)
        assert target.model.generation_config.eos_token_id == ids
        keys.append(key_of(target, AnswersConfig()))
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.parametrize(("template", "warned"), [(TEMPLATE, False), (WORDS, True)])
def test_a_template_that_ends_nowhere_is_said(tmp_path: Path, template: str, warned: bool) -> None:
    cfg = target_with(tmp_path, END, template)
    line = opening(load_target(cfg), cfg)
    assert ("answers may run on: its chat template ends them with" in line) == warned
    assert "\n" not in line

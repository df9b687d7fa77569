"""A draft on disk, saved or exported: it reads back the same, and what is wrong is named.

Run alone: python -m pytest tests/formats/test_saved.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.drafters import Drafter
from specdec.errors import UserError
from specdec.formats import draft_checkpoint, draft_export
from specdec.targets.target import Target
from tests.drafters.families import CONFIGS, V, context, logits_at, make_drafter, make_target, text
from tests.runs import as_before


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(params=list(CONFIGS))
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    return make_drafter(request.param, target)


def test_saved_and_loaded_weights_give_the_same_logits(
    target: Target, drafter: Drafter, tmp_path
) -> None:
    draft_checkpoint.write_draft(tmp_path / "draft", drafter, target)
    loaded = draft_checkpoint.load_draft(tmp_path / "draft", target)
    ctx, anchors = context(target, drafter, text(10)), torch.tensor([[3, 8]])
    ours, theirs = (logits_at(d, ctx, anchors, None) for d in (drafter, loaded))
    if drafter.state_dict().keys() == loaded.state_dict().keys():
        assert torch.equal(ours, theirs)
    else:  # adapters were added to the weights
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("lm", lambda card, x: card["shape"]["model"].update(hidden_size="wide"), "no lm can be"),
        ("lm", lambda card, x: card["shape"]["model"].update(num_attention_heads=0), "card"),
        ("eagle3", lambda card, x: card["shape"].clear(), "'target_vocab' is missing"),
        ("eagle3", lambda card, x: card["config"].update(depth=0), "drafter.json: "),
        (
            "eagle3",
            lambda card, x: x.update({"fc.weight": x["fc.weight"].long()}),
            "'fc.weight' is of type I64",
        ),
        ("eagle3", lambda card, x: x["fc.weight"].fill_(torch.nan), "'fc.weight' .* not finite"),
        ("eagle3", lambda card, x: x["vocab_S"].add_(V - 1), "rise within 0 to 60"),
        ("eagle3", lambda card, x: x["vocab_S"].sub_(1), "rise within 0 to 60"),
        ("eagle3", lambda card, x: x.update(vocab_S=x["vocab_S"].flip(0)), "rise within 0 to 60"),
    ],
)
def test_a_draft_that_does_not_fit_is_told_in_one_line(
    target: Target, tmp_path: Path, name: str, change: Callable[[Any, Any], Any], words: str
) -> None:
    folder = tmp_path / "draft"
    draft_checkpoint.write_draft(folder, make_drafter(name, target), target)
    card = as_before(folder / draft_checkpoint.CARD)
    tensors = load_file(folder / draft_checkpoint.WEIGHTS)
    change(card, tensors)
    (folder / draft_checkpoint.CARD).write_text(json.dumps(card))
    save_file(tensors, folder / draft_checkpoint.WEIGHTS)
    with pytest.raises(UserError, match=words) as caught:
        draft_checkpoint.load_draft(folder, target)
    assert "\n" not in str(caught.value)


FOLDERS = [key for key, layout in draft_export.LAYOUTS.items() if not layout.suffix]


@pytest.mark.parametrize("name,layout", FOLDERS)  # of files: tests/formats/test_gguf.py
def test_export_reads_back_and_names_what_is_wrong(
    target: Target, tmp_path, name: str, layout: str
) -> None:
    target = Target(target.model, _Tokenizer(), "tiny")
    drafter = make_drafter(name, target)
    draft_export.write_export(tmp_path / "out", drafter, target, layout)
    again = draft_export.read_export(tmp_path / "out", drafter, target, layout)
    assert torch.equal(
        draft_export.short_text_logits(drafter, target),
        draft_export.short_text_logits(again, target),
    )
    path = tmp_path / "out" / draft_export.WEIGHTS
    whole = load_file(path)
    victim = sorted(n for n in whole if n.endswith("weight"))[0]
    for change, word in (
        (lambda t: t.pop(victim), "missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "does not belong"),
        (lambda t: t.update({victim: t[victim][:1].clone()}), "shape"),
    ):
        tensors = dict(whole)
        change(tensors)
        save_file(tensors, path)
        with pytest.raises(UserError, match=word):
            draft_export.read_export(tmp_path / "out", drafter, target, layout)


@pytest.mark.parametrize("name", ["eagle3", "medusa", "lm"])
def test_export_refuses_weights_that_are_not_finite(target: Target, tmp_path, name: str) -> None:
    target = Target(target.model, _Tokenizer(), "tiny")
    drafter = make_drafter(name, target)
    weight = next(p for p in drafter.parameters() if p.requires_grad)
    with torch.no_grad():
        weight.view(-1)[0] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        draft_export.write_export(tmp_path / "out", drafter, target)
    assert not (tmp_path / "out").exists()


class _Tokenizer:
    """Stands in where only saving is asked for."""

    eos_token_id = None

    def save_pretrained(self, folder) -> None:
        (folder / "tokenizer.json").write_text("{}")

"""A stage that starts from a draft: its weights and vocabulary are kept, or extended by token id.

Run alone: python -m pytest tests/train/test_initialisation.py
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.targets.target import Target
from tests.drafters.families import CONFIGS, VOCAB, make_drafter, make_target
from tests.runs import as_before, draft
from tests.tiny import Tiny, conversations, records, save_target, write_jsonl
from train.data.sequences import Document
from train.initialisation import InitialisationConfig, initial_drafter

TRAINABLE = [name for name, config in CONFIGS.items() if DRAFTERS[config.name].trains(config)]
STILL = ["optim.lr=1e-30", "loop.eval_every=4"]  # moves no float32
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def said(tokens: list[int]) -> list[Document]:
    """One document, all of it the assistant's."""
    ids = np.array(tokens, np.int32)
    return [Document("d", ids, np.ones(len(ids), bool))]


@pytest.mark.parametrize("name", ["eagle3", "medusa", "lm"])
def test_fine_tuning_on_other_data_starts_where_the_draft_ended(
    tiny: Tiny, tmp_path: Path, training_alone: None, name: str
) -> None:
    """Other conversations, and a learning rate that moves nothing: the weights, and the draft
    vocabulary with its order, are those of the first run's best, bit for bit."""
    tiny.job(tmp_path / "first", name)
    other = write_jsonl(tmp_path / "other.jsonl", conversations(29, seed=9))
    more = [f"drafter.from={tmp_path / 'first' / 'best'}", f"data.path={other}"]
    tiny.job(tmp_path / "second", name, *more, *STILL)
    first, second = draft(tmp_path / "first"), draft(tmp_path / "second")
    assert first.keys() == second.keys()
    for key, weight in first.items():
        assert torch.equal(weight, second[key]), key
    tiny.job(tmp_path / "third", name, *more)  # and it trains on
    assert any(not torch.equal(w, draft(tmp_path / "third")[k]) for k, w in first.items())


@pytest.mark.parametrize("name", ["lm", "eagle3", "mtp", "dflash"])
def test_a_draft_fits_whatever_dtype_its_target_is_stored_in(
    tiny: Tiny, tmp_path: Path, training_alone: None, name: str
) -> None:
    """A config names the dtype of the weights on disk, and that of the weights in memory once a
    target is loaded. Neither is a size of the draft."""
    shutil.copytree(tiny.target, tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    of_target = (f"target.path={tmp_path / 'target'}", "loop.max_tokens=200")
    tiny.job(tmp_path / "first", name, *of_target)
    best = f"drafter.from={tmp_path / 'first' / 'best'}"
    tiny.job(tmp_path / "second", name, best, *of_target)
    assert records(tmp_path / "second")


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_family_takes_over_an_earlier_draft(
    target: Target, tmp_path: Path, name: str
) -> None:
    earlier = make_drafter(name, target)
    draft_checkpoint.write_draft(tmp_path / "draft", earlier, target)
    stage = InitialisationConfig(str(tmp_path / "draft"))
    found = initial_drafter(stage, CONFIGS[name], target, said([1, 2]), 0)
    weights = found.weights_to_save(found.state_dict())
    kept = draft_checkpoint.read_draft(tmp_path / "draft", target).state_dict()
    for key, weight in kept.items():
        torch.testing.assert_close(weights[key], weight, msg=key)


def test_rows_follow_their_token_ids(target: Target, tmp_path: Path) -> None:
    """The data says 3 five times, 60 twice and 0 once, which the draft lacks, and 5, which it has:
    3 and 60 are added. Old rows lie where their tokens are now; the new ones are the target's."""
    earlier = make_drafter("eagle3", target)
    missing = sorted(set(range(target.vocab_size)) - set(VOCAB.tolist()))
    a, b, c = missing[2], missing[-1], missing[0]
    draft_checkpoint.write_draft(tmp_path / "draft", earlier, target)
    documents = said([a] * 5 + [b] * 2 + [c] + [int(VOCAB[0])] * 9)
    stage = InitialisationConfig(str(tmp_path / "draft"), new_tokens=2)
    found = initial_drafter(stage, CONFIGS["eagle3"], target, documents, 0)
    assert found.vocab_S is not None and earlier.vocab_S is not None
    assert found.vocab_S.tolist() == sorted([*VOCAB.tolist(), a, b])
    assert found.config.draft_vocab == found.sizes.draft_vocab == len(VOCAB) + 2
    ours, theirs = found.state_dict()["lm_head.weight"], earlier.state_dict()["lm_head.weight"]
    for row, token in enumerate(found.vocab_S.tolist()):
        if token in (a, b):
            assert torch.equal(ours[row], target.head.weight[token])
        else:
            assert torch.equal(ours[row], theirs[VOCAB.tolist().index(token)])
    assert torch.equal(found.state_dict()["fc.weight"], earlier.state_dict()["fc.weight"])
    draft_checkpoint.write_draft(
        tmp_path / "longer", found, target
    )  # and it is a draft like any other
    loaded = draft_checkpoint.load_draft(tmp_path / "longer", target)
    assert loaded.vocab_S is not None and torch.equal(loaded.vocab_S, found.vocab_S)


def test_fewer_tokens_are_added_than_asked_where_the_data_has_no_more(
    target: Target, tmp_path: Path
) -> None:
    draft_checkpoint.write_draft(tmp_path / "draft", make_drafter("medusa", target), target)
    stage = InitialisationConfig(str(tmp_path / "draft"), new_tokens=7)
    documents = said([*VOCAB.tolist(), *[i for i in range(4) if i not in VOCAB]])
    found = initial_drafter(stage, CONFIGS["medusa"], target, documents, 0)
    added = set(range(4)) - set(VOCAB.tolist())
    assert found.vocab_S is not None
    assert set(found.vocab_S.tolist()) == set(VOCAB.tolist()) | added


def test_what_does_not_fit_is_told_in_one_line(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    tiny.job(tmp_path / "first", "medusa")
    best = tmp_path / "first" / "best"

    def refused(drafter: str, *more: str) -> str:
        with pytest.raises(UserError) as error:
            tiny.job(tmp_path / "run", drafter, *more)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "run" / "config.json").exists()
        return str(error.value)

    start = f"drafter.from={best}"
    assert "a draft of the family medusa: give drafter=medusa" in refused("eagle3", start)
    assert "tensor 'blocks.2" in refused("medusa", start, "drafter.depth=3")
    assert "no weights to train" in refused("ngram", start)
    assert "drafter.head and drafter.copying: give both" in refused("hybrid", "drafter.head=")
    assert "holds no draft" in refused("medusa", f"drafter.from={tmp_path}")
    tiny.job(tmp_path / "copying", "suffix")
    copying = f"drafter.from={tmp_path / 'copying' / 'best'}"
    assert "is a draft of the family suffix" in refused("medusa", copying)
    assert "drafter.from=FOLDER" in refused("medusa", "initialisation.new_tokens=3")
    other = save_target(tmp_path / "other", seed=5)
    assert "other weights" in refused("medusa", start, f"target.path={other}")
    tiny.job(tmp_path / "three", "eagle3")
    start = f"drafter.from={tmp_path / 'three' / 'best'}"
    said = refused("eagle3", start, "drafter.layers=[1,2]")
    assert re.search(r"trained with layers=.1, 2, 3., but this run asks for .1, 2.", said)


def test_a_draft_that_changed_meanwhile_is_told(
    tiny: Tiny, tmp_path: Path, training_alone: None
) -> None:
    tiny.job(tmp_path / "first", "medusa")
    best = tmp_path / "first" / "best"
    tiny.job(tmp_path / "run", "medusa", f"drafter.from={best}")
    lines = len(records(tmp_path / "run"))
    tiny.job(tmp_path / "run", "medusa", f"drafter.from={best}")  # ended: nothing is trained again
    assert len(records(tmp_path / "run")) == lines
    card = as_before(best / "drafter.json")
    shutil.copy(best / "drafter.json", tmp_path / "kept")
    (best / "drafter.json").write_text(json.dumps(card | {"notes": {}}))
    with pytest.raises(UserError, match="the draft that training starts from changed"):
        tiny.job(tmp_path / "run", "medusa", f"drafter.from={best}")

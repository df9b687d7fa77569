"""Draft LMs meet the target's tokenizer: the same one with other padding fits, another does not.

Run alone: python -m pytest tests/drafters/test_vocabulary.py (about 15 s)
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specdec.context import Context
from specdec.decoding.decode import generate
from specdec.decoding.way import Way
from specdec.drafters.lm import LM, LMConfig
from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing
from specdec.formats import draft_checkpoint, draft_export
from specdec.lab.drafters.seq2seq_lm import Seq2SeqLM, Seq2SeqLMConfig
from specdec.lab.targets.seq2seq import Seq2SeqTarget
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets.target import Target
from tests.lab.targets.test_seq2seq import T5
from tests.tiny import WORDS, architectures, batch_of, make_tokenizer

TOKENIZER = make_tokenizer()
SIZE = len(TOKENIZER)
TEXT = [5, 60, 7, 80, 9, 30, 11, 12, 13, 14]
CAT, DOG = (TOKENIZER.convert_tokens_to_ids(word) for word in ("cat", "dog"))


def target_of(rows: int, tokenizer: Any = TOKENIZER) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(architectures(rows, 3)["llama"]).float()
    model.generation_config.eos_token_id = None
    return Target(model, tokenizer, "tiny")


def source_of(folder: Path, rows: int, kind: str = "llama", tied: bool = True) -> LMConfig:
    torch.manual_seed(1)
    config = architectures(rows, 2)[kind]
    config.tie_word_embeddings = tied
    config.pad_token_id = rows - 1
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return LMConfig(depth=3, source=str(folder))


def with_exchanged(folder: Path, one: str, other: str) -> None:
    """Exchange the ids of two tokens of a tokenizer's file."""
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    vocab = whole["model"]["vocab"]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    path.write_text(json.dumps(whole))


def test_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path) -> None:
    config, target = source_of(tmp_path / "draft", SIZE), target_of(SIZE)
    LM.plan(config, target)
    with_exchanged(tmp_path / "draft", "cat", "dog")
    assert CAT < DOG and {"cat", "dog"} < set(WORDS)
    said = f"token {CAT} is 'dog' there, and 'cat' in the target: .*drafter=translated"
    with pytest.raises(UserError, match=said):
        LM.plan(config, target)
    (tmp_path / "draft" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="its tokenizer could not be loaded"):
        LM.plan(config, target)


def test_without_a_tokenizer_the_numbers_of_rows_are_compared(tmp_path: Path) -> None:
    """transformers makes up a tokenizer for a folder that has none; it is not asked."""
    config = source_of(tmp_path / "draft", SIZE)
    assert LM.plan(config, target_of(SIZE, None)).draft_vocab is None
    for path in (tmp_path / "draft").glob("tokenizer*"):
        path.unlink()
    for tokenizer in (None, TOKENIZER):
        assert LM.plan(config, target_of(SIZE, tokenizer)).draft_vocab is None
        with pytest.raises(UserError, match=f"vocab_size={SIZE}, but the target has {SIZE + 6}"):
            LM.plan(config, target_of(SIZE + 6, tokenizer))


def test_a_tokenizer_with_fewer_tokens_fits(tmp_path: Path) -> None:
    """As of a model before its chat tokens were added."""
    config, longer = source_of(tmp_path / "draft", SIZE), make_tokenizer()
    longer.add_tokens(["<|call|>"])
    assert LM.plan(config, target_of(SIZE + 6, longer)).draft_vocab == SIZE


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("rows", "V"), [(SIZE, SIZE + 6), (SIZE + 6, SIZE), (SIZE + 3, SIZE + 3)])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_a_draft_with_other_padding_computes_what_its_source_does(
    tmp_path: Path, kind: str, rows: int, V: int, tied: bool
) -> None:
    config, target = source_of(tmp_path / "draft", rows, kind, tied), target_of(V)
    drafter, both = LM.build(config, target).float().eval(), min(rows, V)
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32).eval()
    ids_BT = torch.tensor([TEXT])
    with torch.no_grad():
        theirs = source(input_ids=ids_BT).logits[0, :, :both]
        hidden = drafter.hidden(Context(ids_BT), torch.tensor([[9]]), torch.zeros(1, 1, 0).long())
        ours = drafter.unembed(hidden[0, 0], 0)
    torch.testing.assert_close(ours[0], theirs[-1], atol=1e-5, rtol=1e-5)
    assert drafter.model.get_input_embeddings().weight.shape[0] == V
    assert drafter.model.get_output_embeddings().weight.shape[0] == V

    choose = Choose(Sampler(1.0), "with", RowDraws([0]), drafter.vocab_S, V)
    q_BGV = drafter.draft(Context(ids_BT), Chain(3), choose).q_BGV
    assert q_BGV is not None and q_BGV.shape[-1] == V
    assert not q_BGV[..., both:].any()
    torch.testing.assert_close(q_BGV.sum(-1), torch.ones(1, 3))

    plain = generate(target, TEXT, max_new_tokens=16, eos=())
    assert generate(target, TEXT, Way(drafter), max_new_tokens=16, eos=()).ids == plain.ids
    draft_checkpoint.write_draft(tmp_path / "best", drafter, target)
    loaded = draft_checkpoint.load_draft(tmp_path / "best", target, torch.float32)
    assert all(torch.equal(x, loaded.state_dict()[n]) for n, x in drafter.state_dict().items())
    assert loaded.sizes.draft_vocab == (rows if rows < V else None)


@pytest.mark.parametrize("tied", [True, False])
def test_a_padded_draft_is_trained_and_exported_with_the_targets_rows(
    tmp_path: Path, tied: bool
) -> None:
    config, target = source_of(tmp_path / "draft", SIZE, tied=tied), target_of(SIZE + 6)
    config.train_embeddings = True
    drafter = LM.build(config, target, torch.arange(2, SIZE)).float()  # not the most frequent ones
    assert drafter.vocab_S is not None and drafter.vocab_S.tolist() == list(range(SIZE))
    mask = [[False] * 4 + [True] * 6]
    batch = batch_of(target, drafter.needs, Sampler(1.0), [TEXT], mask)
    loss = TeacherForcing(drafter, target, Sampler(1.0))(batch)[0]
    loss.backward()
    head = drafter.model.get_output_embeddings().weight
    assert loss.isfinite() and head.grad is not None
    assert head.grad[:SIZE].any() and not head.grad[SIZE:].any()

    draft_export.write_export(tmp_path / "out", drafter.eval(), target)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert model.config.vocab_size == SIZE + 6
    ids_BT = torch.tensor([TEXT])
    with torch.no_grad():
        hidden = drafter.hidden(Context(ids_BT), torch.tensor([[9]]), torch.zeros(1, 1, 0).long())
        logits = model(input_ids=ids_BT).logits[0, -1]
        ours = drafter.unembed(hidden[0, 0], 0)[0]
    torch.testing.assert_close(logits[:SIZE], ours, atol=1e-5, rtol=1e-5)
    assert not logits[SIZE:].any()


def test_an_export_whose_added_rows_an_engine_would_draft_is_refused(tmp_path: Path) -> None:
    config, target = source_of(tmp_path / "draft", SIZE, tied=False), target_of(SIZE + 6)
    drafter = LM.build(config, target).float().eval()
    head = drafter.model.get_output_embeddings().weight
    with torch.no_grad():  # all logits of a place are alike, and below 0 somewhere
        head[:SIZE] = head[5].clone()
        head *= -draft_export.short_text_logits(drafter, target)[0, 0].sign()
    with pytest.raises(UserError, match=f"a logit of 0 to the rows added to the draft's {SIZE}"):
        draft_export.write_export(tmp_path / "out", drafter, target)
    with torch.no_grad():
        head[SIZE + 1] = 1.0
    with pytest.raises(UserError, match="were trained as inputs"):
        draft_export.write_export(tmp_path / "out", drafter, target)


@pytest.mark.parametrize(("rows", "V"), [(SIZE, SIZE + 6), (SIZE + 6, SIZE)])
def test_an_encoder_decoder_with_other_padding(tmp_path: Path, rows: int, V: int) -> None:
    def t5(size: int) -> Any:
        torch.manual_seed(size)
        shape = T5 | {"vocab_size": size, "decoder_start_token_id": 0}
        return AutoModelForSeq2SeqLM.from_config(T5Config(**shape)).float().eval()

    source, target = t5(rows), Seq2SeqTarget(t5(V), TOKENIZER, "tiny")
    source.save_pretrained(tmp_path / "draft")
    TOKENIZER.save_pretrained(tmp_path / "draft")
    config = Seq2SeqLMConfig(depth=2, source=str(tmp_path / "draft"))
    drafter = Seq2SeqLM.build(config, target).float().eval()
    start = target.seq2seq.start
    text = [7, 8, 9, 1, start, 12, 60, 7]
    both = min(rows, V)
    with torch.no_grad():
        hidden = drafter.hidden(
            Context(torch.tensor([text])), torch.tensor([[7]]), torch.zeros(1, 1, 0).long()
        )
        theirs = source(
            input_ids=torch.tensor([text[:4]]), decoder_input_ids=torch.tensor([text[4:]])
        ).logits[0, -1, :both]
    ours = drafter.unembed(hidden[0, 0], 0)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    plain = generate(target, text[:5], max_new_tokens=8, eos=())
    fast = generate(target, text[:5], Way(drafter, Chain(2)), max_new_tokens=8, eos=())
    assert fast.ids == plain.ids
    with_exchanged(tmp_path / "draft", "cat", "dog")
    with pytest.raises(UserError, match=f"token {CAT} is 'dog' there"):
        Seq2SeqLM.build(config, target)

"""LoRA adapters on draft LMs: only they are trained, and nothing is left of them in a draft.

Run alone: pytest tests/drafters/test_lora.py
"""

from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from specdec.context import Context
from specdec.drafters.lm import LM, LMConfig
from specdec.drafters.pretrained import LoraOptions
from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing
from specdec.formats import draft_checkpoint, draft_export
from specdec.lab.drafters.seq2seq_lm import Seq2SeqLM, Seq2SeqLMConfig
from specdec.sampling.sampler import Sampler
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.runs import require_learning_that_resumes
from tests.tiny import Tiny, architectures, batch_of, random_drafter, random_target

RANK = 4
TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(architectures(61, 4)["llama"])


def config(**lora: object) -> LMConfig:
    return LMConfig(depth=2, layers=[0, 3], lora=LoraOptions(**{"rank": RANK, **lora}))


def drafter(target: Target) -> LM:
    """With noise on all weights: adapters that start at zero would hide mistakes."""
    made = random_drafter(config(), target, 0.1)
    assert isinstance(made, LM)
    return made


def logits(drafter: LM | Seq2SeqLM, ids: list[int] = TEXTS[0]) -> torch.Tensor:
    with torch.no_grad():
        hidden = drafter.hidden(Context(torch.tensor([ids])), torch.tensor([[3, 7]]), None)
        return drafter.unembed(hidden, 0)


def test_the_adapters_alone_are_trained(target: Target) -> None:
    """A layer of width 32, 4 heads of 8, 2 KV heads and an MLP of 48: an adapter of rank r on a
    matrix m × n has r (m + n) weights."""
    made = LM.build(config(), target).float()
    trained = {n: p for n, p in made.named_parameters() if p.requires_grad}
    sides = [32 + 32, 32 + 16, 32 + 16, 32 + 32, 32 + 48, 32 + 48, 48 + 32]  # q k v o gate up down
    assert sum(p.numel() for p in trained.values()) == 2 * RANK * sum(sides)
    assert all(".lora_A." in n or ".lora_B." in n for n in trained)
    adapted = [m for m in made.modules() if isinstance(m, LoraLayer)]
    assert len(adapted) == 2 * 7 and all(isinstance(m.base_layer, nn.Linear) for m in adapted)

    batch = batch_of(target, made.needs, Sampler(1.0), TEXTS, [[False] * 4 + [True] * 6] * 2)
    TeacherForcing(made, target, Sampler(1.0))(batch)[0].backward()
    seen = {n for n, p in made.named_parameters() if p.grad is not None}
    assert seen == set(trained) and all(
        p.grad is not None and p.grad.any() for n, p in trained.items() if ".lora_B." in n
    )


def test_adapters_start_at_nothing_and_are_scaled_by_alpha_over_rank(target: Target) -> None:
    plain = LM.build(LMConfig(depth=2, layers=[0, 3]), target).float()
    for alpha, scale in ((None, 2.0), (2.0, 0.5)):
        made = LM.build(config(alpha=alpha), target).float()
        assert torch.equal(logits(made), logits(plain))
        layer = made.model.base_model.layers[0].self_attn.q_proj
        with torch.no_grad():
            layer.lora_A["default"].weight.fill_(0.1)
            layer.lora_B["default"].weight.fill_(0.1)
        name = "model.model.layers.0.self_attn.q_proj.weight"
        moved = made.weights_to_save(made.state_dict())[name] - plain.state_dict()[name]
        torch.testing.assert_close(moved, torch.full((32, 32), scale * RANK * 0.01))


def test_a_draft_on_disk_is_merged_and_drafts_the_same(target: Target, tmp_path: Path) -> None:
    made = drafter(target)
    before = {n: x.clone() for n, x in made.state_dict().items()}
    draft_checkpoint.write_draft(tmp_path / "best", made, target)
    for name, x in made.state_dict().items():
        assert torch.equal(x, before[name]), "saving changes nothing of what is trained"
    loaded = draft_checkpoint.load_draft(tmp_path / "best", target, torch.float32)
    assert not any(isinstance(m, LoraLayer) for m in loaded.modules())
    assert not any("lora" in name for name in loaded.state_dict())
    assert loaded.config == made.config
    assert isinstance(loaded, LM)
    torch.testing.assert_close(logits(loaded), logits(made), atol=1e-5, rtol=1e-5)
    plain = LM.build(LMConfig(depth=2, layers=[0, 3]), target)
    assert not torch.allclose(logits(loaded), logits(plain), atol=1e-2)  # the adapters matter


def test_an_encoder_decoder_is_adapted_too(tmp_path: Path) -> None:
    from tests.lab.targets.test_seq2seq import make_target, prompts

    target = make_target("t5-v1.1")
    target.model.save_pretrained(tmp_path / "source")
    lora = LoraOptions(rank=RANK, targets=["q", "v"])
    cfg = Seq2SeqLMConfig(depth=2, source=str(tmp_path / "source"), lora=lora)
    made = random_drafter(cfg, target, 0.1)
    assert isinstance(made, Seq2SeqLM)
    trained = [n for n, p in made.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in n for n in trained)
    draft_checkpoint.write_draft(tmp_path / "best", made, target)
    loaded = draft_checkpoint.load_draft(tmp_path / "best", target, torch.float32)
    assert isinstance(loaded, Seq2SeqLM)
    text = [*prompts(target)[0], 7, 9, 11, 6, 8]
    ctx, anchors = Context(torch.tensor([text])), torch.tensor([[len(text) - 4]])
    with torch.no_grad():
        one, other = (d.unembed(d.hidden(ctx, anchors, None), 0) for d in (made, loaded))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "lora, words",
    [
        ({"rank": -1}, "drafter.lora.rank=-1"),
        ({"dropout": 1.0}, "drafter.lora.dropout=1.0"),
        ({"alpha": 0.0}, "drafter.lora.alpha=0.0"),
        ({"targets": ["nowhere"]}, "drafter.lora: Target modules .*nowhere"),
    ],
)
def test_options_that_cannot_be(target: Target, lora: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        LM.build(config(**lora), target)


def test_random_weights_are_not_adapted(target: Target) -> None:
    random = LMConfig(depth=2, source="random", lora=LoraOptions(rank=RANK))
    with pytest.raises(UserError, match="nothing to adapt in random weights"):
        LM.build(random, target)
    earlier = LM.build(LMConfig(depth=2, source="random"), target).float()
    made = LM.build(random, target, earlier=earlier).float()  # a draft that was trained before
    assert torch.equal(logits(made), logits(earlier))
    assert all(".lora_" in n for n, p in made.named_parameters() if p.requires_grad)


def test_a_run_learns_resumes_and_exports(tiny: Tiny, tmp_path: Path, one_thread: None) -> None:
    """The whole job, with dropout, interrupted after the checkpoint of step 4."""
    options = ["drafter.lora.rank=4", "drafter.lora.dropout=0.1", "loop.epochs=4"]
    require_learning_that_resumes(tiny, tmp_path, "lm", *options)

    target = load_target(TargetConfig(path=str(tiny.target), dtype="float32", device="cpu"))
    best = draft_checkpoint.load_draft(tmp_path / "whole" / "best", target)
    said = draft_export.write_export(tmp_path / "out", best, target)
    assert "logits identical" in said
    assert torch.equal(
        draft_export.short_text_logits(
            draft_export.read_export(tmp_path / "out", best, target), target
        ),
        draft_export.short_text_logits(best, target),
    )

"""Medusa-2: heads and adapters on the target that are trained together.

Run alone: pytest tests/drafters/test_medusa2.py
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.context import Context, TrainingMoment
from specdec.decoding.decode import generate
from specdec.decoding.way import Way
from specdec.drafters import with_copying
from specdec.drafters.medusa import Medusa, MedusaConfig, TargetLoraOptions
from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing
from specdec.formats import draft_checkpoint
from specdec.losses.loss_config import LossConfig
from specdec.measure.forced import shift
from specdec.measure.results import Results
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.processes import process
from tests.tiny import Tiny, architectures, batch_of, compose, losses, random_drafter, random_target

TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]
MASKS = [[False] * 3 + [True] * 7] * 2
VOCAB = torch.arange(60)[torch.arange(60) % 3 != 1]
ADAPTED = ["drafter.adapter.rank=4", "drafter.adapter.dropout=0.1", "drafter.adapter.weight=1"]


@pytest.fixture
def target() -> Target:
    return random_target(architectures(61, 4)["llama"])


def config(rank: int = 4, weight: float = 0.5) -> MedusaConfig:
    adapter = TargetLoraOptions(rank=rank, weight=weight)
    return MedusaConfig(depth=2, draft_vocab=40, adapter=adapter)


def made(target: Target, noise: float = 0.02) -> Medusa:
    """A drafter with noise on its adapters: they start at zero, which would hide mistakes."""
    drafter = random_drafter(config(), target, noise, VOCAB)
    assert isinstance(drafter, Medusa)
    return drafter


def logits(model: Target, ids: list[int]) -> Tensor:
    return model.model(torch.tensor([ids])).logits[0].detach()


def kl(before: Tensor, after: Tensor) -> Tensor:
    p, q = before.softmax(-1), after.softmax(-1)
    return (p * (p / q).log()).sum(-1)


def test_the_loss_is_the_heads_own_for_the_adapted_target_and_its_divergence(
    target: Target,
) -> None:
    """The loss is computed twice: with adapters in a view of the target; and with plain heads that
    read the hidden states and p of a target into which the adapters are merged. At half the run,
    the schedule is sin(π / 4); every anchor a counts KL(original ‖ adapted) after the tokens up to
    a.
    """
    drafter, loss_config = made(target), LossConfig()
    plain, own = drafter.with_adapters_merged(target)
    sampler, moment = Sampler(1.0), TrainingMoment(progress=0.5)
    forcing = TeacherForcing(drafter, target, sampler, loss_config)
    batch = batch_of(target, drafter.needs, sampler, TEXTS, MASKS)
    loss, seen = forcing(batch, moment=moment)
    theirs = batch_of(own, plain.needs, sampler, TEXTS, MASKS)
    heads, expected = TeacherForcing(plain, own, sampler, loss_config)(theirs, moment=moment)
    torch.testing.assert_close(seen, expected, atol=1e-4, rtol=1e-4)
    assert seen[0, 2] > 0
    moved = sum(
        float(kl(logits(target, ids), logits(own, ids))[2:9].sum()) for ids in TEXTS
    )  # the tokens that count are 3 to 9, so anchors are 2 to 8
    assert moved > 0.1
    assert float(loss.detach()) == pytest.approx(
        0.5 * math.sin(math.pi / 4) * float(heads.detach()) + moved, rel=1e-4
    )
    measured = forcing(batch, measure=True).alpha.sampled
    again = TeacherForcing(plain, own, sampler)(theirs, measure=True).alpha.sampled
    torch.testing.assert_close(measured, again, atol=1e-4, rtol=1e-4)


def test_packed_texts_do_not_see_each_other(target: Target) -> None:
    drafter = made(target)
    _, own = drafter.with_adapters_merged(target)
    ids, position = torch.tensor([TEXTS[0] + TEXTS[1]]), torch.arange(10).repeat(2)[None]
    found = drafter.adapted(Context(ids, position_BT=position), 0.5)
    assert found is not None and found[1] == pytest.approx(0.5 * math.sqrt(0.5))
    theirs = own.hidden_states(torch.tensor(TEXTS), drafter.needs)[1].flatten(0, 1)
    torch.testing.assert_close(found[0][0].detach(), theirs, atol=1e-4, rtol=1e-4)


def test_heads_and_adapters_are_trained_and_the_target_is_not(target: Target) -> None:
    drafter, checksum = made(target, 0.0), target.checksum()
    before = [logits(target, ids) for ids in TEXTS]
    forcing = TeacherForcing(drafter, target, Sampler(1.0))
    batch = batch_of(target, drafter.needs, Sampler(1.0), TEXTS, MASKS)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer, alpha = torch.optim.Adam(trained, 1e-2), []
    for _ in range(10):
        loss, seen = forcing(batch, moment=TrainingMoment(progress=1.0))
        alpha.append(float(seen[0, 2] / seen[0, 0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert alpha[-1] > alpha[0]  # on the texts that it is trained on
    assert all(p.grad is not None and p.grad.any() for p in trained)
    assert all(p.grad is None for p in target.model.parameters())
    assert target.checksum() == checksum
    for ids, was in zip(TEXTS, before, strict=True):
        assert torch.equal(logits(target, ids), was)


def test_a_draft_on_disk_comes_with_its_target(target: Target, tmp_path: Path) -> None:
    drafter, before = made(target), logits(target, TEXTS[0])
    draft_checkpoint.write_draft(tmp_path / "best", drafter, target)
    loaded, own = draft_checkpoint.load_draft_with_target(tmp_path / "best", target, torch.float32)
    assert own is not target and torch.equal(logits(target, TEXTS[0]), before)
    assert own.name == "tiny-llama, adapted with its draft"
    ctx = batch_of(target, drafter.needs, Sampler(1.0), TEXTS, MASKS).ctx
    found = drafter.adapted(ctx, 0.0)
    assert found is not None
    theirs = own.hidden_states(ctx.ids_BT, loaded.needs)[0].final_BTD
    torch.testing.assert_close(found[0].detach(), theirs, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(theirs, ctx.final_BTD, atol=1e-2)
    assert not any(".lora_" in name for name, _ in own.model.named_parameters())
    assert loaded.state_dict().keys() == {
        n for n in drafter.state_dict() if not n.startswith("adapters.")
    }
    for ids in TEXTS:
        asked = torch.tensor([ids])  # 0 is a token here, which the mask keeps
        plain = own.model.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=20, do_sample=False
        )
        fast = generate(own, ids, Way(loaded, Chain(2)), max_new_tokens=20)
        assert fast.ids == plain[0, len(ids) :].tolist()
    with pytest.raises(
        UserError, match="adapted along with it: load both, with load_draft_with_target"
    ):
        draft_checkpoint.load_draft(tmp_path / "best", target)
    with pytest.raises(UserError, match="which a hybrid does not have"):
        with_copying(draft_checkpoint.read_draft(tmp_path / "best", target), "suffix", target)


def test_the_shift_is_counted_over_the_originals_responses(target: Target) -> None:
    none = shift(target, target, TEXTS, 6, 2)
    assert (none.kl.value, none.same.value, none.kl.n, none.same.n) == (0, 1, 12, 2)
    _, own = made(target).with_adapters_merged(target)
    moved, expected, same = shift(target, own, TEXTS, 6, 1), 0.0, 0
    for ids in TEXTS:
        text, n = [*ids, *generate(target, ids, max_new_tokens=6).ids], len(ids)
        expected += float(kl(logits(target, text), logits(own, text))[n - 1 : n + 5].sum())
        same += text[n:] == generate(own, ids, max_new_tokens=6).ids
    assert moved.kl.value == pytest.approx(expected / 12, rel=1e-4) and moved.kl.value > 0.01
    assert moved.same.value == same / 2 and moved.original == "tiny-llama"


def test_the_second_stage_starts_from_the_heads_of_the_first(target: Target) -> None:
    first = random_drafter(config(rank=0), target, 0.1, torch.arange(40))
    second = Medusa.build(config(), target, torch.arange(40), earlier=first)
    for name, x in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], x)
    _, own = second.float().with_adapters_merged(target)
    assert torch.equal(logits(own, TEXTS[0]), logits(target, TEXTS[0]))


@pytest.mark.parametrize("more", ["combine_with=suffix", "rounds.data=on_policy"])
def test_what_needs_the_target_as_it_is(tiny: Tiny, more: str) -> None:
    with pytest.raises(UserError, match="medusa adapts the target with these settings"):
        compose([*tiny.overrides("medusa", *ADAPTED), more, "data.responses=target"])


def test_options_that_cannot_be() -> None:
    for name in ("rank", "weight"):
        with pytest.raises(UserError, match=f"drafter.adapter.{name}=-1"):
            TargetLoraOptions(**{name: -1})


def test_two_stages_make_a_report_and_a_target_to_serve(
    tiny: Tiny, tmp_path: Path, one_thread: None
) -> None:
    tiny.job(tmp_path / "one", "medusa", "export=null")
    start = f"drafter.from={tmp_path / 'one' / 'best'}"
    run = tmp_path / "two"
    tiny.job(run, "medusa", *ADAPTED, start, "responses.temperature=1", "loop.epochs=4")
    assert losses(run)[0][1]["loss"][0] < losses(tmp_path / "one")[0][1]["loss"][0]
    results = Results.load(run / "report")
    assert results.shift is not None and results.shift.original == str(tiny.target)
    assert results.headline()["shift/kl"] == results.shift.kl.value > 0
    assert results.target == f"{tiny.target}, adapted with its draft"
    assert results.asked[0].identical == results.prompts
    said = (run / "report" / "report.md").read_text()
    assert f"lossless with respect to the adapted target, not to {tiny.target}" in said

    cfg = TargetConfig(path=str(tiny.target), dtype="float32", device="cpu")
    _, own = draft_checkpoint.load_draft_with_target(run / "best", load_target(cfg))
    served = load_target(TargetConfig(str(run / "export-target"), "float32", device="cpu"))
    assert torch.equal(logits(served, TEXTS[0]), logits(own, TEXTS[0]))
    again = process(["scripts/export", str(run / "best"), "--to", str(tmp_path / "out")])
    assert again.returncode == 2 and "give --with-target FOLDER as well" in again.stderr

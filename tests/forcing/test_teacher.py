"""Teacher forcing: which anchors a draft is trained at, and the loss and gradient over them.

Run alone: python -m pytest tests/forcing/test_teacher.py
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.context import Context, TrainingMoment
from specdec.drafters import DRAFTERS
from specdec.drafters.base import AnchorsConfig, Drafter
from specdec.drafters.medusa import Medusa, MedusaConfig, TargetLoraOptions
from specdec.drafters.peagle import PEagleConfig
from specdec.forcing import anchors as anchoring
from specdec.forcing.anchors import Anchors, anchors_of, divisor, together
from specdec.forcing.batch import Batch
from specdec.forcing.teacher import TeacherForcing
from specdec.lab.drafters.mtp_heads import MTPHeadsConfig
from specdec.losses import chunked
from specdec.losses.loss_config import LossConfig
from specdec.losses.loss_terms import LOSS_TERMS, LossInputs
from specdec.sampling.sampler import Sampler
from specdec.targets.target import Target
from specdec.theory.alpha import acceptance
from tests.device import DEVICE
from tests.drafters.families import CONFIGS, make_drafter, make_target, text
from tests.tiny import architectures, batch_of, random_drafter, random_target

TRAINABLE = [name for name, config in CONFIGS.items() if DRAFTERS[config.name].trains(config)]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def batch_with(target: Target, drafter: Drafter, counted: int, length: int = 20) -> Batch:
    """A text whose last tokens count, which makes as many anchors."""
    ids = text(0, length)[0].tolist()
    mask = [False] * (length - counted) + [True] * counted
    return batch_of(target, drafter.needs, Sampler(1.0), [ids], [mask])


def read_at_once(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let a loss read so many logits at a time, on whatever device."""
    for name in ("AT_ONCE", "AT_ONCE_ON_GPU"):
        monkeypatch.setattr(chunked, name, count)


def gradient(
    forcing: TeacherForcing, batch: Batch, anchors: Sequence[Anchors] | None = None
) -> list[Tensor]:
    """Of the loss divided by the anchors' total, for every trained parameter."""
    forcing.zero_grad()
    total = sum(a.total for a in anchors) if anchors else float(batch.mask_BT.sum())
    loss, _ = forcing(batch, anchors)
    (loss / total).backward()
    return [p.grad.clone() for p in forcing.drafter.parameters() if p.grad is not None]


def row(batch: Batch) -> tuple[Tensor, ...]:
    assert batch.ctx.document_BT is not None and batch.ctx.position_BT is not None
    return batch.mask_BT, batch.ctx.document_BT, batch.ctx.position_BT


# Which anchors


def test_anchors_by_hand() -> None:
    """Two documents, of 5 and 3 tokens, and padding. Tokens 2, 3, 4 count, and 6, 7: anchors are
    1, 2, 3 of the first and of the second 6 alone, since 5 is its first token. Depth 1 is valid
    where the token after the next counts too."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 0]]).bool()
    document = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1]])
    position = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0]])
    found = anchors_of(mask, document, position, 2)
    assert found.position_N.tolist() == [1, 2, 3, 6]
    assert found.valid_NK.tolist() == [[1, 1], [1, 1], [1, 0], [1, 0]]
    assert found.weight_NK.tolist() == [[1, 1], [1, 1], [1, 0], [1, 0]]
    assert found.total == 4
    shared = anchors_of(mask, document, position, 2, per="sequence")
    third = pytest.approx(1 / 3)
    assert shared.weight_NK.tolist() == [[third, third], [third, third], [third, 0], [1, 0]]
    assert shared.total == pytest.approx(2)  # documents
    both = together([found, shared])
    assert both.row_N.tolist() == [0] * 4 + [1] * 4 and both.total == pytest.approx(6)


def test_weighted_anchors_by_hand() -> None:
    """The texts of `test_anchors_by_hand`; an anchor counts as much as the token after it, in a
    decoder's speculation step as much as itself. Shares of a text are those of its anchors' number,
    so that a text of weight .5 counts half."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 0]]).bool()
    document = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1]])
    position = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0]])
    weight = torch.tensor([[9, 9, 0.5, 2, 2, 9, 0.25, 3, 9]])
    found = anchors_of(mask, document, position, 2, weight_BT=weight)
    assert found.weight_NK.tolist() == [[0.5, 0.5], [2, 2], [2, 0], [3, 0]]
    assert found.total == 7.5
    shared = anchors_of(mask, document, position, 2, per="sequence", weight_BT=weight)
    assert shared.weight_NK[:, 0].tolist() == pytest.approx([0.5 / 3, 2 / 3, 2 / 3, 3])
    assert shared.total == pytest.approx(4.5)
    drafted = torch.full((1, 9, 2), -1)
    drafted[0, 3], drafted[0, 7, 0] = 1, 1
    steps = anchors_of(mask, document, position, 2, drafted_BTK=drafted, weight_BT=weight)
    assert steps.position_N.tolist() == [3, 7]
    assert steps.weight_NK.tolist() == [[2, 2], [3, 0]]
    for totals, expected in (([], 1), ([0.0], 1), ([1 - 1e-7], 1), ([0.25, 0.5], 0.75), ([3.0], 3)):
        assert divisor(totals) == expected


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_gradient_of_half_a_weight_is_half(target: Target, name: str) -> None:
    """Whatever a family draws or adds; the figures stay as they are."""
    drafter = make_drafter(name, target)
    forcing = TeacherForcing(drafter, target, Sampler(1.0))
    batch, found = batch_with(target, drafter, 12), []
    arrays = [x[0].cpu().numpy() for x in row(batch)]
    for weight in (None, np.full(20, 0.5, np.float32)):
        anchors = forcing.anchors(*arrays, 3, None, weight)
        drafter.zero_grad()
        loss, seen = forcing(batch, [anchors], TrainingMoment(0.5, [3]))
        loss.backward()
        grads = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
        found.append((anchors.total, [loss.detach(), *grads], seen))
    (total, whole, seen), (half_total, half, same) = found
    assert half_total == total / 2 and torch.equal(seen, same)
    assert any(x.abs().sum() > 0 for x in whole)
    torch.testing.assert_close(half, [x / 2 for x in whole])


def test_drawn_anchors_stand_for_all() -> None:
    valid = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [1, 0]]).bool()
    weight = AnchorsConfig(2).draw(valid, torch.Generator().manual_seed(0))
    assert (weight > 0).any(-1).sum() == 2
    assert set(weight[:, 0].tolist()) == {0.0, 2.0}  # 4 of them, 2 drawn
    assert torch.equal(weight[:, 1] > 0, (weight[:, 0] > 0) & valid[:, 1])
    for few in (4, 5, None):
        assert torch.equal(AnchorsConfig(few).draw(valid, torch.Generator()), valid.float())


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_the_gradient_at_drawn_anchors_is_unbiased(target: Target, per: str) -> None:
    """6 anchors, 2 of them drawn: the mean over all 15 pairs, each as likely, is the gradient over
    all 6. Seeds are tried until every pair has come up."""
    drafter = make_drafter("eagle3", target)
    drafter.config.anchors.per_row = 2
    forcing = TeacherForcing(drafter, target, Sampler(1.0), LossConfig(per=per))
    batch = batch_with(target, drafter, 6)
    arrays = [x[0].cpu().numpy() for x in row(batch)]
    drawn = {}
    for seed in range(300):
        found = forcing.anchors(*arrays, seed)
        again = forcing.anchors(*arrays, seed)
        assert torch.equal(found.position_N, again.position_N)
        assert found.total == pytest.approx(6 if per == "token" else 1)
        drawn[tuple(found.position_N.tolist())] = found
    assert len(drawn) == 15
    each = [gradient(forcing, batch, [found]) for found in drawn.values()]
    drafter.config.anchors.per_row = None
    whole = gradient(forcing, batch, [forcing.anchors(*arrays, 0)])
    assert len(whole) > 5
    for wanted, *parts in zip(whole, *each, strict=True):
        assert any((part - wanted).abs().max() > 0.1 * wanted.abs().max() for part in parts)
        # float32: 15 sums of two anchors against one of six
        torch.testing.assert_close(
            torch.stack(parts).mean(0), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-4
        )


def test_per_sequence_every_text_weighs_the_same(target: Target) -> None:
    """Texts of 3 and 12 counted tokens: per sequence the mean of their own means, per token the
    mean over 15."""
    drafter = make_drafter("eagle3", target)
    ids = [text(seed, 20)[0].tolist() for seed in (0, 1)]
    masks = [[False] * (20 - n) + [True] * n for n in (3, 12)]
    batches = [
        batch_of(target, drafter.needs, Sampler(1.0), [i], [m])
        for i, m in zip(ids, masks, strict=True)
    ]
    both = batch_of(target, drafter.needs, Sampler(1.0), ids, masks)
    both.ctx.document_BT = torch.tensor([[0] * 20, [1] * 20])
    token = TeacherForcing(drafter, target, Sampler(1.0))
    sequence = TeacherForcing(drafter, target, Sampler(1.0), LossConfig(per="sequence"))
    with torch.no_grad():
        short, long = (float(token(batch)[0]) for batch in batches)
        assert float(token(both)[0]) == pytest.approx(short + long, rel=1e-5)
        assert float(sequence(both)[0]) == pytest.approx(short / 3 + long / 12, rel=1e-5)


# The forward pass of training, and what a loss sees


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_trained_parameter_has_its_gradient(target: Target, name: str) -> None:
    """In one chunk or in many: the same gradient, and none is left out."""
    found = []
    for chunk in (1000, 3):
        loss_config = LossConfig(chunk=chunk)
        forcing = TeacherForcing(make_drafter(name, target), target, Sampler(1.0), loss_config)
        batch = batch_with(target, forcing.drafter, 10)
        trained = [p for p in forcing.drafter.parameters() if p.requires_grad]
        found.append(gradient(forcing, batch))
        assert len(found[-1]) == len(trained)
        assert all(g.abs().max() > 0 for g in found[-1])
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-3)


def test_a_family_may_train_in_a_way_of_its_own(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`training_hidden` is what the loss reads, with the moment of the run; α does not."""
    drafter = make_drafter("eagle3", target)
    forcing = TeacherForcing(drafter, target, Sampler(1.0))
    batch = batch_with(target, drafter, 6)
    plain, _ = forcing(batch)
    measured = forcing(batch, measure=True).alpha.sampled
    seen: list[TrainingMoment] = []

    def noisy(ctx: Context, anchors_BA: Tensor, moment: TrainingMoment) -> Tensor:
        seen.append(moment)
        hidden = drafter.hidden(ctx, anchors_BA, None)
        noise = [
            torch.rand(hidden.shape[1:], generator=g, device=hidden.device)
            for g in moment.generators(hidden.device)
        ]
        return hidden + torch.stack(noise)

    monkeypatch.setattr(drafter, "training_hidden", noisy)
    moment = TrainingMoment(0.25, [7])
    first, again = (forcing(batch, moment=moment)[0] for _ in range(2))
    assert seen == [moment, moment]
    assert torch.equal(first, again) and not torch.equal(first, plain)
    assert not torch.equal(forcing(batch, moment=TrainingMoment(0.25, [8]))[0], first)
    assert torch.equal(forcing(batch, measure=True).alpha.sampled, measured)


class Estimating(Medusa):
    estimates_acceptance = True

    def confidence(self, hidden_NKD: Tensor) -> Tensor:
        return hidden_NKD.mean(-1).sigmoid()


@pytest.mark.parametrize(("few", "compares"), [(2, False), (1, False), (2, True)])
def test_a_piece_holds_what_a_loss_may_read(
    target: Target, few: int, compares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p of depth k at anchor a is the target's own at a + k, from the hidden states that are there;
    in chunks of 2 anchors, read together or one by one. With a reference a chunk is read whole,
    however much is read at once."""
    drafter = make_drafter("medusa", target)
    drafter.__class__ = Estimating
    reference = make_drafter("medusa", target, noise=0.1) if compares else None
    cfg = LossConfig(chunk=2)
    read_at_once(monkeypatch, 1 if compares else few * drafter.depth * 40)
    forcing = TeacherForcing(drafter, target, Sampler(1.0), cfg, reference)
    batch = batch_with(target, drafter, 6)
    pieces = []
    loss = cfg.loss
    monkeypatch.setattr(cfg, "loss", lambda piece: (pieces.append(piece), loss(piece))[1])
    forcing(batch, moment=TrainingMoment(0.5, [0]))
    assert [len(piece.log_p) for piece in pieces] == [few] * (16 // few)  # 6 and 10 for padding
    assert sum(int(piece.valid[:, 0].sum()) for piece in pieces) == 6
    assert pieces[0].progress == 0.5
    log_p_TV = Sampler(1.0).log_probs(target.logits(batch.final_BTD[0]))
    assert drafter.vocab_S is not None
    first = 20 - 6 - 1  # the first anchor: the token before the first that counts
    for n, piece in enumerate(pieces):
        for i in range(few):
            for k in range(drafter.depth):
                at = first + few * n + i + k
                if not piece.valid[i, k]:
                    assert at >= 19
                    continue
                torch.testing.assert_close(piece.log_p[i, k], log_p_TV[at, drafter.vocab_S])
                assert torch.equal(piece.target_hidden[i, k], batch.final_BTD[0, at])
        confidence, other = piece.confidence, piece.reference_log_q
        assert confidence is not None and (other is not None) == compares
        torch.testing.assert_close(confidence, piece.hidden.mean(-1).sigmoid())
        if other is None:
            continue
        assert other.shape == piece.log_q.shape and not other.requires_grad
        assert (other - piece.log_q).abs().max() > 0.01
    named = dict(forcing.named_parameters())
    assert len(named) == len(list(drafter.parameters()))  # the reference is none of them


CUTOFFS = {
    "top_p": Sampler(0.7, top_p=0.5),
    "top_k": Sampler(1.0, top_k=4),
    "both": Sampler(1.3, top_k=6, top_p=0.7),
}
# losses that pull q towards p at every token where p has more mass
PULLING = ["kl", "soft_ce", "reverse_kl", "jsd", "tv", "nla", "lk_hybrid", "expected_length"]
PULLING += ["expected_tree", "top_k", "on_policy", "adaspec"]


def training_pieces(target: Target, sampler: Sampler, z_NKS: Tensor) -> LossInputs:
    """A piece at 6 anchors of a text whose draft logits are these, over the whole vocabulary."""
    drafter = random_drafter(MedusaConfig(depth=2, draft_vocab=None), target, 0.1)
    ids = text(0, 20)[0].tolist()
    batch = batch_of(target, drafter.needs, sampler, [ids], [[False] * 12 + [True] * 8])
    anchors = batch.anchors(2, "token")
    assert len(anchors.row_N) == 8
    anchors = Anchors(anchors.row_N[:6], anchors.position_N[:6], anchors.weight_NK[:6], 6)
    forcing = TeacherForcing(drafter, target, sampler)
    columns = forcing.target_columns(batch, anchors, slice(0, 6), training=True)
    states_NKD = torch.zeros(6, 2, 1)
    piece = forcing.loss_inputs(columns, slice(0, 6), slice(0, 2), z_NKS, states_NKD)
    piece.progress, piece.reference_log_q = 1.0, torch.zeros_like(z_NKS).log_softmax(-1)
    return piece


@pytest.mark.parametrize("cut", CUTOFFS)
@pytest.mark.parametrize("name", PULLING)
def test_a_token_outside_the_draft_s_nucleus_has_a_gradient(
    target: Target, name: str, cut: str
) -> None:
    """The draft's logits are the target's with the sign changed, so their nuclei have no token in
    common and α is 0 as served. Every token of p's nucleus is pulled up all the same."""
    sampler = CUTOFFS[cut]
    first = training_pieces(target, sampler, torch.zeros(6, 2, target.vocab_size))
    z = (-target.logits(first.target_hidden)).requires_grad_()
    piece = training_pieces(target, sampler, z)
    inside = piece.as_served.p > 0
    assert not (inside & (piece.as_served.q > 0)).any()
    assert not acceptance(piece.as_served).sampled.any()
    more = {"paths": [[0], [1], [0, 0]]} if name == "expected_tree" else {}
    more |= {"k": 3} if name == "top_k" else {}
    more |= {"keep": 1.0} if name == "adaspec" else {}
    (gradient,) = torch.autograd.grad(LOSS_TERMS[name](piece, **more).sum(), z)
    if name == "expected_length" or name == "expected_tree":  # β of depth 0 is a factor of depth 1
        inside[:, 1] = False
    if name == "top_k":
        inside &= first.p >= first.p.topk(3, -1).values[..., -1:]
    assert gradient.isfinite().all() and int(inside.sum()) > 6
    assert (gradient[inside] < 0).all()


RAISED = ["kl", "nla", "lk_hybrid", "reverse_kl", "jsd", "tv"]


# a device can break no more of one loss than of another here: test_losses.py has numbers of each
@pytest.mark.parametrize("name", RAISED if DEVICE.type == "cpu" else RAISED[:1])
def test_training_with_cutoffs_raises_alpha_as_it_is_served(target: Target, name: str) -> None:
    """From disjoint nuclei, 300 steps on the logits themselves bring α with the cutoffs from 0 to
    above .9."""
    sampler = CUTOFFS["top_p"]
    first = training_pieces(target, sampler, torch.zeros(6, 2, target.vocab_size))
    z = (-0.3 * target.logits(first.target_hidden)).requires_grad_()
    optimizer = torch.optim.Adam([z], lr=0.1)
    assert acceptance(training_pieces(target, sampler, z).as_served).sampled.mean() < 0.01
    for _ in range(300):
        optimizer.zero_grad()
        LOSS_TERMS[name](training_pieces(target, sampler, z)).sum().backward()
        optimizer.step()
    assert acceptance(training_pieces(target, sampler, z).as_served).sampled.mean() > 0.9


@pytest.mark.parametrize("sampler", [CUTOFFS["both"], Sampler(1.0)])
def test_alpha_in_training_is_that_of_serving(
    target: Target, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With cutoffs, training's statistics are the sums of the table that a measurement reads, and
    a confidence learns the same α. Without cutoffs, there is nothing apart."""
    drafter = make_drafter("medusa", target, noise=0.3)
    drafter.__class__ = Estimating
    ids = text(0, 20)[0].tolist()
    batch = batch_of(target, drafter.needs, sampler, [ids], [[False] * 8 + [True] * 12])
    cfg, pieces = LossConfig(), list[LossInputs]()
    forcing = TeacherForcing(drafter, target, sampler, cfg)
    loss = cfg.loss
    monkeypatch.setattr(cfg, "loss", lambda piece: (pieces.append(piece), loss(piece))[1])
    table, (_, seen) = forcing(batch, measure=True), forcing(batch)
    wanted = torch.stack([x.sum(0) for x in table.alpha], -1)
    torch.testing.assert_close(seen[:, 2:], wanted)
    (piece,) = pieces
    assert (piece.served is None) == (not sampler.truncates)
    assert not piece.log_q.isneginf().any() and not piece.log_p.isneginf().any()
    p = target.logits(batch.final_BTD)[0].div(sampler.temperature).softmax(-1)
    assert drafter.vocab_S is not None
    torch.testing.assert_close(piece.p[0, 0], p[7, drafter.vocab_S])
    served, c = piece.as_served.beta.detach(), piece.confidence
    assert c is not None
    bce = -served * c.log() - (1 - served) * (1 - c).log()
    torch.testing.assert_close(LOSS_TERMS["confidence"](piece), bce, atol=1e-5, rtol=1e-5)


def test_a_piece_knows_how_much_a_depth_stands_for(target: Target) -> None:
    """Of P-EAGLE's depths, those that are kept weigh as much more as they are fewer."""
    drafter = random_drafter(PEagleConfig(depth=3, draft_vocab=None, keep=0.5), target, 0.1)
    cfg, pieces = LossConfig(terms={"expected_length": 1.0}), list[LossInputs]()
    forcing = TeacherForcing(drafter, target, Sampler(1.0), cfg)
    batch = batch_with(target, drafter, 12)
    mask, document, position = (x[0].cpu().numpy() for x in row(batch))
    anchors = forcing.anchors(mask, document, position, 3)
    loss = cfg.loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cfg, "loss", lambda piece: (pieces.append(piece), loss(piece))[1])
        forcing(batch, [anchors])
    (piece,) = pieces
    assert piece.weight is not None
    kept, N = anchors.weight_NK.to(piece.weight.device), len(anchors.weight_NK)
    assert torch.equal(piece.valid[:N], kept > 0) and len(kept.unique()) > 3
    assert torch.equal(piece.weight[:N] * kept.amax(-1, keepdim=True), kept)


def test_p_is_the_target_s_whatever_the_draft_s_precision() -> None:
    """While a draft trains in bfloat16 on a float32 target, p is made of the target's logits in
    float32, as log Z is: bit for bit the p of a draft that trains in float32."""
    target = make_target()
    forcing = TeacherForcing(make_drafter("eagle3", target), target, Sampler(1.0))
    batch = batch_with(target, forcing.drafter, 16)

    def p(rounded: bool) -> Tensor:
        kind = target.device.type
        with torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=rounded):
            table = forcing(batch, measure=True, more=lambda piece: (*piece.p.unbind(-1),))
        return torch.stack(table.more)

    assert torch.equal(p(True), p(False))


@pytest.mark.parametrize("name", ["eagle3", "falcon", "dflash", "medusa"])
def test_anchors_without_weight_change_nothing(
    target: Target, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of a step have few different sizes: its 6 anchors are read as 16."""
    drafter = make_drafter(name, target)
    forcing = TeacherForcing(drafter, target, Sampler(1.0))
    batch, widths, found = batch_with(target, drafter, 6), [], []
    of_training = "read_by_heads" if drafter.separate_heads else "training_hidden"
    read = getattr(drafter, of_training)

    def recorded(ctx: Context, anchors_BA: Tensor, *moment: TrainingMoment) -> Tensor:
        widths.append(anchors_BA.shape[1])
        return read(ctx, anchors_BA, *moment)

    monkeypatch.setattr(drafter, of_training, recorded)
    for multiple in (1, 16):
        monkeypatch.setattr(anchoring, "ALIKE", multiple)
        drafter.zero_grad()
        loss, seen = forcing(batch, moment=TrainingMoment(0.5, [0]))
        loss.backward()
        found.append([loss.detach(), seen, *(p.grad for p in drafter.parameters())])
    assert widths == [6, 16] and int(found[1][1][0, 0]) == 6
    torch.testing.assert_close(found[1], found[0])


def test_terms_add_up(target: Target) -> None:
    drafter = make_drafter("eagle3", target)
    batch = batch_with(target, drafter, 6)

    def loss(**terms: float) -> float:
        forcing = TeacherForcing(drafter, target, Sampler(1.0), LossConfig(terms))
        return float(forcing(batch)[0].detach())

    whole = loss(nla=1.0, smooth_l1=0.1)
    assert whole == pytest.approx(loss(nla=1.0) + 0.1 * loss(smooth_l1=1.0), rel=1e-6)


# Chunks within chunks


def at_once(forcing: TeacherForcing, target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of one text, and its -log β before the sampler's cutoffs and three α after them,
    each summed by depth [K, 4], from tensors over all positions and the vocabulary."""
    drafter, K = forcing.drafter, forcing.drafter.train_depth
    anchors = batch.anchors(K, "token")
    hidden_NKD = drafter.hidden(batch.ctx, anchors.position_N[None], None)[0]
    ids_S = torch.arange(target.vocab_size) if drafter.vocab_S is None else drafter.vocab_S
    at_NK = anchors.position_N[:, None] + torch.arange(K)

    def pairs(sampler: Sampler) -> tuple[Tensor, Tensor]:
        q = [sampler.probs(drafter.unembed(hidden_NKD[:, k], k)) for k in range(K)]
        p_TV = sampler.probs(target.logits(batch.final_BTD[0]))
        return p_TV[at_NK.clamp_max(len(p_TV) - 1)], torch.stack(q, 1)

    p_NKV, q_NKS = pairs(forcing.sampler.uncut)
    loss_NK = -torch.minimum(p_NKV[..., ids_S], q_NKS).sum(-1).log()
    p_NKV, q_NKS = pairs(forcing.sampler)
    p_NKS, best_NK = p_NKV[..., ids_S], q_NKS.argmax(-1)
    beta_NK = torch.minimum(p_NKS, q_NKS).sum(-1)
    drafted_NK = p_NKS.gather(-1, best_NK[..., None])[..., 0]
    greedy_NK = (ids_S[best_NK] == p_NKV.argmax(-1)).float()
    columns = torch.stack([loss_NK, beta_NK, drafted_NK, greedy_NK], -1)
    by_depth = (columns * anchors.valid_NK[..., None]).sum(0)
    decay, least = forcing.loss_config.depth_decay, forcing.loss_config.least_weight
    decay_K = torch.tensor([max(decay**k, least) for k in range(K)])
    return (by_depth[:, 0] * decay_K).sum(), by_depth.detach()


@pytest.mark.parametrize("name", ["eagle3", "eagle", "medusa", "mtp_heads", "lm"])
@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(0.7, top_k=30)], ids=["t1", "top-k"])
def test_chunks_within_chunks_equal_everything_at_once(
    target: Target, name: str, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 anchors, unembedded by 4 and read by 3: loss, all α and every gradient, in float32."""
    drafter = make_drafter(name, target)
    forcing = TeacherForcing(drafter, target, sampler, LossConfig(chunk=4, least_weight=0.7))
    ids = text(0, 20)[0].tolist()
    batch = batch_of(target, drafter.needs, sampler, [ids], [[False] * 10 + [True] * 10])
    size = drafter.train_depth * (target.vocab_size if drafter.vocab_S is None else 40)
    read_at_once(monkeypatch, 3 * size)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    wanted, columns = at_once(forcing, target, batch)
    gradients = torch.autograd.grad(wanted, trained)
    loss, statistics = forcing(batch)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(statistics[:, 1:], columns, rtol=1e-5, atol=1e-5)
    assert (statistics[:, 2:4] > 0).all()
    if name == "eagle3" and DEVICE.type == "cpu":  # with other draws, drafts never agree greedily
        assert (statistics[:, 4] > 0).any()
    for got, gradient in zip(torch.autograd.grad(loss, trained), gradients, strict=True):
        scale = float(gradient.abs().max())
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-4 * scale)


# One head at a time


class Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that exist at once. It counts those that operations make,
    forward or backward, except tensors as large as a weight, which are mostly its gradient."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.sizes, self.known = {x.numel() for x in weights}, set[int]()
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor) and x.numel() not in self.sizes:
                self.count(x.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        name, size = id(storage), storage.nbytes()
        if name in self.known:
            return
        self.known.add(name)
        self.now += size
        self.peak = max(self.peak, self.now)

        def freed() -> None:
            self.known.discard(name)
            self.now -= size

        weakref.finalize(storage, freed)


HEADS: dict[str, Callable[[int], Any]] = {
    "medusa": lambda depth: MedusaConfig(depth=depth, draft_vocab=None, num_layers=2),
    "medusa, own LM heads": lambda depth: MedusaConfig(
        depth=depth, draft_vocab=None, shared_head=False
    ),
    "mtp_heads": lambda depth: MTPHeadsConfig(depth=depth),
}


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="on a device, another thread frees graphs, at any time"
)
@pytest.mark.parametrize("name", HEADS)
def test_memory_of_a_step_does_not_grow_with_the_heads(name: str) -> None:
    """There are 64 anchors, and the vocabulary is 128 times as wide as the hidden states. If heads
    took no turns, 8 would take 4 times as much as 2; in turns, only the 32 numbers of each head's
    state at an anchor remain."""
    target = random_target(architectures(4096, 3)["llama"])
    ids = [text(0, 96, 4096)[0].tolist()]

    def peak(depth: int, couples: bool = False) -> int:
        drafter = random_drafter(HEADS[name](depth), target, 0.1)
        terms = {"d_pace" if couples else "nla": 1.0}
        forcing = TeacherForcing(drafter, target, Sampler(1.0), LossConfig(terms))
        batch = batch_of(target, drafter.needs, Sampler(1.0), ids, [[False] * 31 + [True] * 65])
        loss = None  # an earlier run's graph would count
        for _ in range(2):  # the first also fills tables that stay
            del loss
            with Alive([*drafter.parameters(), *target.model.parameters()]) as alive:
                loss, _ = forcing(batch)
                loss.backward()
        return alive.peak

    assert peak(8) < 1.15 * peak(2)
    assert peak(8, couples=True) > 3 * peak(2)  # a loss that couples depths needs them all


@pytest.mark.parametrize("name", [*HEADS, "adapted"])
@pytest.mark.parametrize("loss_config", ["nla", "kl"])
def test_heads_in_turn_have_the_gradients_of_all_heads_together(
    target: Target, name: str, loss_config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anchors are cut into chunks of 4. The heads are trained in turn, and then together, since
    the same loss claims to couple the depths. The trunk of an adapted target is trained too,
    and gets the sum of the heads' gradients."""
    config = (
        HEADS[name](3)
        if name in HEADS
        else MedusaConfig(depth=3, draft_vocab=None, adapter=TargetLoraOptions(rank=4, weight=0.5))
    )
    drafter = random_drafter(config, target, 0.1)
    cfg = LossConfig({loss_config: 1.0}, chunk=4)
    forcing = TeacherForcing(drafter, target, Sampler(1.0), cfg)
    batch = batch_with(target, drafter, 10)
    trained, results = [p for p in drafter.parameters() if p.requires_grad], []
    sizes: list[int] = []
    loss = cfg.loss
    monkeypatch.setattr(
        cfg, "loss", lambda piece: (sizes.append(piece.log_p.shape[1]), loss(piece))[1]
    )
    for couples in (False, True):
        monkeypatch.setattr(LossConfig, "couples", couples)
        total, seen = forcing(batch, moment=TrainingMoment(0.5, [0]))
        results.append([total.detach(), seen, *torch.autograd.grad(total, trained)])
    assert set(sizes[: len(sizes) * 3 // 4]) == {1} and set(sizes[len(sizes) * 3 // 4 :]) == {3}
    for turns, whole in zip(*results, strict=True):
        scale = float(whole.abs().max())
        torch.testing.assert_close(turns, whole, rtol=1e-5, atol=1e-6 * scale)  # float32

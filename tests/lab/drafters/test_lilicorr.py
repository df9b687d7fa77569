"""LiLiCorr: a plain twin of its formulas, its candidates, and its q in training.

Run alone: python -m pytest tests/lab/drafters/test_lilicorr.py (about 15 s)
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, layer_norm, linear, silu

from specdec.context import Context, TrainingMoment
from specdec.drafters.dflash import DFlashConfig
from specdec.errors import UserError
from specdec.lab.drafters.lilicorr import LiLiCorr, LiLiCorrConfig
from specdec.targets.target import Target
from tests.drafters.plain import rms
from tests.runs import require_learning
from tests.tiny import Tiny, architectures, random_drafter, random_target

V, K, C, D = 61, 3, 5, 8
GIVEN: dict[str, Any] = dict(depth=K, num_layers=2, candidates=C, correction_width=D, rank=4)
KEPT = torch.arange(0, 60, 2)
ANCHORS = torch.tensor([[3, 9, 14]])


def text(length: int = 20) -> Tensor:
    return torch.randint(0, 30, (1, length), generator=torch.Generator().manual_seed(3)) * 2


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(architectures(V, 6)["llama"])
    target.model.double()
    return target


def lilicorr(target: Target, vocab_S: Tensor | None = KEPT, **given: Any) -> LiLiCorr:
    size = None if vocab_S is None else len(vocab_S)
    config = LiLiCorrConfig(**GIVEN | {"draft_vocab": size} | given)
    drafter = random_drafter(config, target, 0.3, vocab_S).double()
    drafter.attach(target)
    assert isinstance(drafter, LiLiCorr)
    return drafter


def read(target: Target, drafter: LiLiCorr, ids: Tensor) -> Context:
    return target.hidden_states(ids, drafter.needs)[0]


def twin(
    drafter: LiLiCorr, target: Target, states_KD: Tensor, fused_D: Tensor
) -> tuple[list[list[int]], list[list[Tensor]], list[list[Tensor]], Tensor]:
    """Candidates [K][C], their `out` and `into`, and the first `out`, one candidate at a time."""
    w = {n: x.detach() for n, x in drafter.lilicorr.state_dict().items()}

    def project(name: str, x: Tensor) -> Tensor:
        return linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    own, x = [], torch.zeros(K * C, D, dtype=torch.double)
    for k in range(K):
        log_q = drafter.head(states_KD[k]).log_softmax(-1)
        ranked = sorted(range(len(log_q)), key=lambda i: -float(log_q[i]))[:C]
        own.append(ranked)
        for c, i in enumerate(ranked):
            token = i if drafter.vocab_S is None else int(drafter.vocab_S[i])
            embedded = target.embed(torch.tensor(token))
            gap = log_q[i] - log_q[ranked[0]]
            seen = torch.stack(
                [log_q[i], log_q[i].exp(), gap, *torch.tensor([c / (C - 1), float(c == 0)])]
            ).double()
            norm = layer_norm(seen, (5,), w["feature_mlp.0.weight"], w["feature_mlp.0.bias"])
            made = project("feature_mlp.3", silu(project("feature_mlp.1", norm)))
            x[k * C + c] = project("token_proj", embedded) + project(
                "pass_hidden_proj", states_KD[k]
            )
            x[k * C + c] += made + w["slot_embedding"][k, 0] + w["rank_embedding"][c]
    heads = drafter.config.correction_heads
    for i in range(drafter.config.correction_layers):
        of = f"layers.{i}."
        normed = rms(x, w[f"{of}attn_norm.weight"])
        qkv = linear(normed, w[f"{of}attn.in_proj_weight"], w[f"{of}attn.in_proj_bias"])
        q, k_, v = (y.unflatten(-1, (heads, -1)) for y in qkv.chunk(3, -1))
        attended = torch.zeros_like(x)
        for one in range(K * C):
            for h in range(heads):
                scores = []
                for other in range(K * C):
                    away = one // C - other // C
                    bias = w["relative_slot_bias"][h, away + K]
                    if away == 0:
                        bias = bias + w["same_slot_bias"][h]
                    scores.append(q[one, h] @ k_[other, h] / q.shape[-1] ** 0.5 + bias)
                share = torch.stack(scores).softmax(0)
                size = D // heads
                attended[one, h * size : (h + 1) * size] = share @ v[:, h]
        x = x + project(f"{of}attn.out_proj", attended)
        inner = silu(project(f"{of}mlp.0", rms(x, w[f"{of}mlp_norm.weight"])))
        x = x + project(f"{of}mlp.2", inner)
    x = rms(x, w["output_norm.weight"])
    anchor = rms(project("context_proj", fused_D), w["anchor_norm.weight"])
    both = [torch.cat([y, anchor, y * anchor]) for y in x]
    made_of = [silu(project("factor_input_proj", y)) for y in both]
    out = [[project("out_head", made_of[k * C + c]) for c in range(C)] for k in range(K)]
    into = [[project("in_head", made_of[k * C + c]) for c in range(C)] for k in range(K)]
    return own, out, into, project("anchor_out_head", anchor)


@pytest.mark.parametrize("vocab_S", [KEPT, None], ids=["pruned", "whole"])
def test_logits_are_scaled_cosines_of_the_reference(target: Target, vocab_S: Tensor | None) -> None:
    """After a candidate, the logits are the twin's; after any other token, the block's own; only
    candidates have a probability."""
    drafter, ids = lilicorr(target, vocab_S), text()
    ctx = read(target, drafter, ids)
    hidden = drafter.hidden(ctx, ANCHORS, None)
    fused, seen = drafter.fuse(ctx.hidden_states(drafter.needs)), set()
    for a, at in enumerate(ANCHORS[0].tolist()):
        states = hidden[0, a, :, : drafter.llama.hidden_size].detach()
        own, out, into, first = twin(drafter, target, states, fused[0, at - 1])
        place = range(V) if vocab_S is None else vocab_S.tolist()
        for before in (*(place[i] for i in own[0]), next(i for i in place if i not in own[0])):
            drafted = torch.tensor([[[before] if x == a else [0] for x in range(3)]])
            got = drafter.hidden(ctx, ANCHORS, drafted)
            for k in range(2):
                logits = drafter.unembed(got[0, a, k], k)
                ways = (
                    [first]
                    if k == 0
                    else [out[0][c] for c in range(C) if place[own[0][c]] == before]
                )
                seen.add((k, len(ways)))
                expected = (
                    torch.stack([16 * cosine_similarity(ways[0], y, dim=0) for y in into[k]])
                    if ways
                    else drafter.head(states[k])[own[k]]
                )
                torch.testing.assert_close(logits[own[k]], expected, atol=1e-5, rtol=1e-5)
                assert int(logits.isfinite().sum()) == C
    assert seen == {(0, 1), (1, 1), (1, 0)}


def test_no_state_stands_before_the_first_token(target: Target) -> None:
    """At anchor 0 the projected state before it is 0, as in the reference."""
    drafter = lilicorr(target)
    ctx = read(target, drafter, text())
    with torch.no_grad():
        drafter.lilicorr.anchor_out_head.bias.zero_()
    hidden = drafter.hidden(ctx, torch.tensor([[0, 1]]), None)
    logits = hidden[0, :, 0, drafter.llama.hidden_size :][:, :C]
    assert not logits[0].any() and logits[1].any()


def test_training_draws_the_block_or_the_correction(target: Target) -> None:
    """In training, q is the block's own at some anchors. At the others, each token that is no
    candidate has the block's probability, and the candidates share the rest."""
    drafter, ids = lilicorr(target).train(), text(60)
    ctx, anchors = read(target, drafter, ids), torch.arange(2, 50)[None]
    hidden = drafter.training_hidden(ctx, anchors, TrainingMoment(seeds=[7]))[0, :, 0]
    same = drafter.training_hidden(ctx, anchors, TrainingMoment(seeds=[7]))[0, :, 0]
    assert torch.equal(hidden, same)
    q = drafter.unembed(hidden, 0).softmax(-1)
    block = drafter.head(hidden[:, : drafter.llama.hidden_size]).softmax(-1)
    own = torch.zeros_like(block).scatter(-1, block.topk(C).indices, 1).bool()
    torch.testing.assert_close(q[~own], block[~own], atol=1e-6, rtol=1e-5)
    kept = (q - block).abs().amax(-1) < 1e-6
    assert 10 < int(kept.sum()) < 38
    corrected = hidden[:, drafter.llama.hidden_size :][:, :C].softmax(-1)
    order = block.topk(C).indices
    share = q.gather(-1, order) / q.gather(-1, order).sum(-1, keepdim=True)
    torch.testing.assert_close(share[~kept], corrected[~kept], atol=1e-6, rtol=1e-5)


def test_it_starts_from_a_dflash_draft(target: Target) -> None:
    earlier = random_drafter(DFlashConfig(depth=K, num_layers=2, draft_vocab=30), target, 0.3, KEPT)
    config = LiLiCorrConfig(**GIVEN | {"draft_vocab": 30})
    drafter = random_drafter(config, target, 0.0, KEPT, earlier=earlier)
    theirs = earlier.state_dict()
    assert all(torch.equal(drafter.state_dict()[name], x) for name, x in theirs.items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"correction_heads": 3}, "drafter.correction_heads=3: give a divisor"),
        ({"candidates": 31}, "drafter.candidates=31: the draft vocabulary has 30 tokens"),
    ],
)
def test_impossible_sizes_are_rejected(target: Target, given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        lilicorr(target, **given)


def test_a_run_learns(tiny: Tiny, tmp_path: Path) -> None:
    tiny.job(tmp_path / "run", "lilicorr", "optim.lr=5e-3")
    require_learning(tmp_path / "run")

"""Blocks drafted in one pass: what their slots read, where they stand and what they predict.

Run alone: python -m pytest tests/drafters/test_block.py (about 10 s)
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.context import Context
from specdec.drafters import DRAFTERS, block
from specdec.drafters.block import Block
from specdec.drafters.dflash import DFlashConfig
from specdec.drafters.dflash2 import DFlash2, DFlash2Config
from specdec.drafters.dspark import DSpark, DSparkConfig
from specdec.drafters.jetspec import JetSpecConfig
from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing, logits_of
from specdec.losses.loss_config import LossConfig
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import BestFirst, Chain
from specdec.targets.target import Target
from tests.tiny import architectures, batch_of, compose, random_drafter, random_target

V, D, Dh, T = 61, 32, 8, 20
CONFIGS = {
    "dflash": DFlashConfig(depth=4, num_layers=2, draft_vocab=30, mask_token=7),
    "jetspec": JetSpecConfig(depth=4, num_layers=2, draft_vocab=30, mask_token=7),
    "dflash2": DFlash2Config(
        depth=4, num_layers=2, draft_vocab=30, mask_token=7, taps=3, group=8, rank=5
    ),
    "dspark": DSparkConfig(depth=4, num_layers=2, draft_vocab=30, mask_token=7, rank=5),
}


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(architectures(V, 6)["llama"])
    target.model.double()
    return target


@pytest.fixture(params=list(CONFIGS))
def drafter(request: pytest.FixtureRequest, target: Target) -> Block:
    drafter = random_drafter(CONFIGS[request.param], target, 0.2, torch.arange(0, 60, 2)).double()
    drafter.attach(target)
    assert isinstance(drafter, Block)
    return drafter


def text(seed: int, length: int = T) -> Tensor:
    return torch.randint(2, V, (1, length), generator=torch.Generator().manual_seed(seed))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x_HND: Tensor, position_N: Tensor) -> Tensor:
    """Rotary embedding: numbers i and i + Dh/2 are a plane that turns by
    position / 10000^(2i/Dh)."""
    angle = position_N[:, None] / 10000 ** (torch.arange(0, Dh, 2).double() / Dh)
    cos, sin = angle.cos(), angle.sin()
    one, two = x_HND[..., : Dh // 2], x_HND[..., Dh // 2 :]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def convolved(x_ND: Tensor, read_ND: Tensor, of: dict[str, Tensor], kind: str, side: int) -> Tensor:
    """Σ_t (base_t + correction_t(read_j)) x_{j-t} over the slots of one block, without a loop over
    anything but slots and taps; a correction holds for 8 channels."""
    base, found = of[f"{kind}_conv.base_kernel"][side], torch.zeros_like(x_ND)
    correction = read_ND @ of[f"{kind}_conv.kernel_projection.weight"].T
    correction = correction.view(len(x_ND), 2, 3, D // 8)[:, side].repeat_interleave(8, -1)
    for j in range(len(x_ND)):
        for tap in range(min(3, j + 1)):
            found[j] += (base[tap] + correction[j, tap]) * x_ND[j - tap]
    return found


def plain(
    weights: dict[str, Tensor],
    target: Target,
    name: str,
    hidden_states: Tensor,
    anchor: int,
    drafted: list[int],
) -> Tensor:
    """The logits of depths 0 … by the reference's formulas, for one anchor: dense attention of the
    block's slots over the `hidden_states` [a, F] before the anchor and over the block."""
    a, M = len(hidden_states), 4 if name == "dspark" else 5
    ids = torch.tensor([anchor] + [7] * (M - 1))
    x = target.embedding(ids)
    c = rms(hidden_states @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    keep = torch.ones(M, a + M, dtype=torch.bool)
    if name == "jetspec":
        keep = keep.tril(a)
    for i in range(2):
        of = {n.removeprefix(f"layers.{i}."): w for n, w in weights.items()}
        normed = read = rms(x, of["input_layernorm.weight"])
        if name == "dflash2":
            read = convolved(read, normed, of, "attention", 0)
        both = torch.cat([c, read])

        def heads(x: Tensor, kind: str, of: dict[str, Tensor] = of) -> Tensor:
            found = x @ of[f"self_attn.{kind}_proj.weight"].T
            found = found.unflatten(-1, (-1, Dh)).transpose(0, 1)
            norm = of.get(f"self_attn.{kind}_norm.weight")
            return found if norm is None else rms(found, norm)

        query = turned(heads(read, "q"), a + torch.arange(M))
        keys = turned(heads(both, "k"), torch.arange(a + M)).repeat_interleave(2, 0)
        scores = (query @ keys.transpose(1, 2) / Dh**0.5).masked_fill(~keep, -torch.inf)
        seen = scores.softmax(-1) @ heads(both, "v").repeat_interleave(2, 0)
        made = seen.transpose(0, 1).flatten(1) @ of["self_attn.o_proj.weight"].T
        if name == "dflash2":
            made = convolved(made, normed, of, "attention", 1)
        x = x + made
        normed = read = rms(x, of["post_attention_layernorm.weight"])
        if name == "dflash2":
            read = convolved(read, normed, of, "mlp", 0)
        gate, up = (read @ of[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        made = (gate * gate.sigmoid() * up) @ of["mlp.down_proj.weight"].T
        x = x + (convolved(made, normed, of, "mlp", 1) if name == "dflash2" else made)
    h = rms(x, weights["norm.weight"])
    logits = h @ target.head.weight[weights["vocab_S"]].T
    if name == "dspark":
        before = weights["markov_w1.weight"][[anchor, *drafted]]
        return logits + before @ weights["markov_w2.weight"].T
    if name == "dflash2":
        of = {n.removeprefix("candidate_selector."): w for n, w in weights.items()}
        before = of["predecessor_codebook"][[anchor, *drafted]]
        gate = before * (h[1:] @ of["hidden_projection.weight"].T)
        return logits[1:] + gate @ of["successor_codebook"].T
    return logits[1:]


def expected(drafter: Block, target: Target, ids_T: Tensor, a: int) -> Tensor:
    """`plain` for anchor a of a text that begins with these ids."""
    hidden_states = target.hidden_states(ids_T[None], drafter.needs)[0].layers_BTF
    assert hidden_states is not None
    drafted = ids_T[a + 1 : a + 4].tolist()
    name, anchor = drafter.config.name, int(ids_T[a])
    return plain(drafter.state_dict(), target, name, hidden_states[0, :a], anchor, drafted)


def test_blocks_are_the_references(target: Target, drafter: Block) -> None:
    """Two documents in a row, anchors in no order: each as if it were alone. Norms and rotary
    factors are computed in float32, so logits of order 1 agree to about 1e-6."""
    one, two = text(1), text(2)
    position = torch.arange(T).repeat(2)[None]
    document = torch.arange(2).repeat_interleave(T)[None]
    ctx, _ = target.hidden_states(
        torch.cat([one, two], 1), drafter.needs, position_BT=position, document_BT=document
    )
    anchors = [5, T + 9, 1, T + 1, T - 5]
    hidden = drafter.hidden(ctx, torch.tensor([anchors]), None)[0]
    logits = logits_of(drafter, hidden)
    for found, a in zip(logits, anchors, strict=True):
        wanted = expected(drafter, target, (one if a < T else two)[0], a % T)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def drafted(drafter: Block, ctx: Context, shape: Any, cache: Any) -> Any:
    draws = RowDraws([0] * len(ctx.ids_BT))
    return drafter.draft(ctx, shape, Choose(Sampler(0), "fixed", draws, drafter.vocab_S, V), cache)


def test_drafting_is_the_same_block_and_its_keys_never_stay(target: Target, drafter: Block) -> None:
    """The chain of likeliest tokens of the reference, step by step through one cache, for two
    rows of unequal length."""
    ids, cache = torch.cat([text(3), text(4)]), drafter.new_cache()
    for ends in ((4, 9), (7, 10), (12, 16)):
        ctx, _ = target.hidden_states(ids[:, : max(ends)], drafter.needs)
        ctx.lengths = list(ends)
        found = drafted(drafter, ctx, Chain(4), cache).tokens_BG.tolist()
        assert cache.lengths == [end - 1 for end in ends] and cache.scratch == 0
        for b, end in enumerate(ends):
            wanted: list[int] = []
            for k in range(4):
                before = torch.tensor([*ids[b, :end].tolist(), *wanted, 2, 2, 2, 2][: end + 4])
                best = int(expected(drafter, target, before, end - 1)[k].argmax())
                assert drafter.vocab_S is not None
                wanted.append(int(drafter.vocab_S[best]))
            assert found[b] == wanted


@pytest.mark.parametrize("name", ["dflash", "jetspec"])
def test_one_pass_gives_the_marginals_of_a_tree(target: Target, name: str) -> None:
    """The three likeliest paths of marginals, by hand: their log-probabilities add."""
    drafter = random_drafter(CONFIGS[name], target, 0.2, torch.arange(0, 60, 2)).double()
    drafter.attach(target)
    assert isinstance(drafter, Block) and drafter.vocab_S is not None
    ids = text(5, 9)
    ctx, _ = target.hidden_states(ids, drafter.needs)
    proposal = drafted(drafter, ctx, BestFirst(depth=4, nodes=3), drafter.new_cache())
    wanted = expected(drafter, target, torch.cat([ids[0], ids[0, :4]]), 8).log_softmax(-1)
    one, two, three = (log_S.topk(3).values.tolist() for log_S in wanted[:3])
    paths = {(0,): one[0], (1,): one[1], (2,): one[2], (1, 0): one[1] + two[0]}
    paths |= {(0, 0): one[0] + two[0], (0, 1): one[0] + two[1]}
    paths |= {(0, 0, 0): one[0] + two[0] + three[0]}
    best = sorted(sorted(paths, key=lambda path: -paths[path])[:3], key=lambda p: (len(p), p))
    ranked = wanted.topk(3).indices
    tokens = [int(drafter.vocab_S[ranked[len(path) - 1, path[-1]]]) for path in best]
    assert proposal.tokens_BG[0].tolist() == tokens
    assert [sum(p == path[:-1] for path in best) for p in best] == [
        int((proposal.parents_BG[0] == i).sum()) for i in range(3)
    ]


def test_the_confidence_head_learns_acceptance(target: Target) -> None:
    """Trained on its term alone, it explains more of β's variance than the sixth that 38 numbers
    fit by chance to 230 anchors and depths."""
    drafter = random_drafter(CONFIGS["dspark"], target, 0.2, torch.arange(0, 60, 2)).double()
    drafter.attach(target)
    assert isinstance(drafter, DSpark)
    ids = text(6, 60)[0].tolist()
    sampler = Sampler(1.0)
    batch = batch_of(target, drafter.needs, sampler, [ids], [[True] * 60])
    forcing = TeacherForcing(drafter, target, sampler, LossConfig({"confidence": 1.0}))
    loss, _ = forcing(batch)
    loss.backward()
    assert drafter.markov_w2.weight.grad is None  # β is given
    assert drafter.confidence_head.weight.grad is not None
    for weight in drafter.parameters():
        weight.requires_grad = False
    head = list(drafter.confidence_head.parameters())
    optimizer = torch.optim.Adam([p.requires_grad_() for p in head], lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        forcing(batch)[0].backward()
        optimizer.step()
    found = forcing(batch, measure=True, more=lambda piece: (piece.confidence, piece.beta))
    valid = found.anchors.valid_NK
    estimate, beta = (x[valid].detach() for x in found.more)
    left = (estimate - beta).square().mean() / beta.var()
    assert float(left) < 0.7


def test_convolutions_and_selector_start_without_effect(target: Target) -> None:
    """If all other weights are the same, DFlash and DFlash 2 give the same logits."""
    ctx = target.hidden_states(text(4), DFlash2.build(CONFIGS["dflash2"], target).needs)[0]
    logits: list[Tensor] = []
    same: dict[str, Tensor] = {}
    for name in ("dflash", "dflash2"):
        torch.manual_seed(0)
        drafter = DRAFTERS[name].build(CONFIGS[name], target).double()
        drafter.attach(target)
        drafter.load_state_dict(same, strict=False)
        same = drafter.state_dict()
        logits.append(logits_of(drafter, drafter.hidden(ctx, torch.tensor([[3, 9]]), None)))
    torch.testing.assert_close(*logits)


def test_the_confidence_head_is_trained_beside_any_loss(target: Target) -> None:
    """Under −log α alone, the head learns as under its own term; what −log α trains gets the same
    gradient as without the head, and a weight of 0 leaves the head alone."""
    drafter = random_drafter(CONFIGS["dspark"], target, 0.2, torch.arange(0, 60, 2)).double()
    drafter.attach(target)
    assert isinstance(drafter, DSpark)
    ids = text(6, 60)[0].tolist()
    batch = batch_of(target, drafter.needs, Sampler(1.0), [ids], [[True] * 60])

    def gradients(terms: dict[str, float]) -> dict[str, Tensor]:
        drafter.zero_grad()
        TeacherForcing(drafter, target, Sampler(1.0), LossConfig(terms))(batch)[0].backward()
        return {n: x.grad.clone() for n, x in drafter.named_parameters() if x.grad is not None}

    beside, without = gradients({"nla": 1.0}), gradients({"nla": 1.0, "confidence": 0.0})
    alone, both = gradients({"confidence": 1.0}), gradients({"nla": 1.0, "confidence": 1.0})
    assert beside.keys() == without.keys() == both.keys()
    for name, gradient in beside.items():
        if name.startswith("confidence_head"):
            torch.testing.assert_close(gradient, alone[name])
            assert gradient.abs().max() > 0 and without[name].abs().max() == 0
        else:
            assert torch.equal(gradient, without[name]), name
    assert not torch.equal(both["fc.weight"], beside["fc.weight"])  # as the paper trains


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_start_scores_as_the_targets_layers_do(kind: str) -> None:
    """Queries and keys of what a layer reads: with Qwen3's own norms the scores are the target's,
    and without norms they have the same size. The norms of keys stay 1."""
    config = architectures(V, 6)[kind]
    config.initializer_range = 0.1
    target = random_target(config)
    with torch.no_grad():
        for layer in target.layers:
            for name, weight in layer.named_parameters():
                if "norm" in name:  # one size for each head, or a query's would turn with its key's
                    weight.fill_(0.5 + len(name) / 100)
    drafter = DSpark.build(DSparkConfig(num_layers=2), target)
    read = torch.randn(400, D, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(drafter.layers, target.layers[-2:], strict=True):
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
        assert ours.self_attn.k_norm.weight.eq(1).all()
        x, scores = ours.input_layernorm(read), []
        for attention in (ours.self_attn, theirs.self_attn):
            heads = [getattr(attention, f"{n}_proj")(x)[:, :Dh] for n in "qk"]
            if hasattr(attention, "q_norm"):
                heads = [attention.q_norm(heads[0]), attention.k_norm(heads[1])]
            scores.append((heads[0] * heads[1]).sum(-1))
        if kind == "qwen3":
            torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=1e-4)
        assert float((scores[0].std() / scores[1].std()).detach()) == pytest.approx(1, abs=0.35)


def test_settings_that_fit_no_target(target: Target) -> None:
    with pytest.raises(UserError, match=r"drafter\.mask_token=61: give 0 to 60"):
        random_drafter(DFlashConfig(mask_token=V), target, 0.1)
    with pytest.raises(UserError, match=r"drafter\.layers=\[7\]: layers of this target"):
        random_drafter(DFlashConfig(layers=[7]), target, 0.1)
    with pytest.raises(UserError, match="rising order"):
        compose(["drafter=dflash", "drafter.layers=[2,1]"])


@pytest.mark.parametrize(("layers", "wanted"), [(1, [4]), (3, [2, 3, 4]), (5, [2, 3, 4])])
def test_the_layers_read_are_the_references(target: Target, layers: int, wanted: list[int]) -> None:
    """1 + round(1 + i (L - 4) / (n - 1)) for i < n, each once; 2, 10, 18, 26 and 34 for L = 36."""
    assert DSpark.plan(DSparkConfig(num_layers=layers), target).layers == wanted
    deep = random_target(architectures(V, 36)["llama"])
    read = DSpark.plan(DSparkConfig(num_layers=5), deep).layers
    assert read == [2, 10, 18, 26, 34]


def test_many_slots_keep_less_for_the_backward_pass(
    target: Target, drafter: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows attention is computed again; the gradients are the same bit for bit."""
    ids = text(3, 40)
    batch = batch_of(target, drafter.needs, Sampler(), ids.tolist(), [[True] * 40])
    forcing = TeacherForcing(drafter, target, Sampler())

    def step(many: int) -> tuple[list[Tensor], int]:
        kept: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        monkeypatch.setattr(block, "MANY", many)
        drafter.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss, _ = forcing(batch)
        loss.backward()
        return [p.grad for p in drafter.parameters() if p.grad is not None], sum(kept.values())

    plain, whole = step(1 << 30)
    again, less = step(1)
    assert plain and len(plain) == len(again)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert less < 0.8 * whole, (less, whole)  # an MLP is 1.5 times as wide as the stream here

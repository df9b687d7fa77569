"""HASS, EAGLE-3.1 and P-EAGLE beside plain twins of their reference implementations.

A twin computes every position of one text with dense masks and without a cache, in float64 but for
transformers' RMSNorm, which rounds to float32.

Run alone: python -m pytest tests/drafters/test_eagle_recipes.py (some seconds)
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from specdec.context import Context, TrainingMoment
from specdec.drafters.eagle import Eagle, EagleConfig
from specdec.drafters.eagle3 import Eagle3, Eagle3Config
from specdec.drafters.layers import Attention, Layer
from specdec.drafters.peagle import PEagle, PEagleConfig
from specdec.drafters.recurrence import Recurrent
from specdec.errors import UserError
from specdec.formats import draft_export
from specdec.targets.target import Target
from tests.tiny import architectures, compose, random_drafter, random_target

V, D, T, K = 61, 32, 12, 3
P = T - 1  # pair t is token t + 1 with the hidden state of t


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(architectures(V, 6)["llama"])
    target.model.double()
    return target


def made(config: object, target: Target) -> Recurrent:
    drafter = random_drafter(config, target, 0.1, torch.arange(40)).double()
    drafter.attach(target)
    assert isinstance(drafter, Recurrent)
    return drafter


def read(target: Target, drafter: Recurrent) -> Context:
    ids = torch.randint(2, V, (1, T), generator=torch.Generator().manual_seed(0))
    return target.hidden_states(ids, drafter.needs)[0]


def attend(attention: Attention, query: Tensor, keys: Tensor, sees: Tensor, rope: tuple) -> Tensor:
    """Eager attention of `query` [T, …] over `keys` [P, …], with cos and sin of both."""
    head_dim, groups = attention.head_dim, attention.heads // attention.kv_heads
    q, k, v = (
        project(x).view(1, len(x), -1, head_dim).transpose(1, 2)
        for project, x in (
            (attention.q_proj, query),
            (attention.k_proj, keys),
            (attention.v_proj, keys),
        )
    )
    (q_cos, q_sin), (k_cos, k_sin) = rope
    q, _ = apply_rotary_pos_emb(q, q, q_cos[None], q_sin[None])
    _, k = apply_rotary_pos_emb(k, k, k_cos[None], k_sin[None])
    k, v = repeat_kv(k, groups), repeat_kv(v, groups)
    scores = (q @ k.transpose(2, 3) / head_dim**0.5).masked_fill(~sees, -torch.inf)
    return attention.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(len(query), -1))


def factors(drafter: Eagle | Eagle3, at: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [N, D] at these positions, by transformers."""
    cos, sin = drafter.rope.rotary(torch.zeros(()), at[None])
    return cos[0], sin[0]


def finish(layer: Layer, stream: Tensor) -> Tensor:
    return stream + layer.mlp(layer.post_attention_layernorm(stream))


def stacked(
    drafter: Eagle3, tokens: Tensor, hidden_state: Tensor, at: Tensor, sees: Tensor
) -> Tensor:
    """vLLM's LlamaModel before its last norm (llama_eagle3.py), over N pairs at once."""
    rope = factors(drafter, at)
    first = drafter.midlayer
    normed = first.hidden_norm(hidden_state)
    both = torch.cat([first.input_layernorm(drafter.embed(tokens)), normed], -1)
    residual = normed if drafter.config.norm_before_residual else hidden_state
    stream = finish(first, residual + attend(first.self_attn, both, both, sees, (rope, rope)))
    for layer in drafter.upper:
        x = layer.input_layernorm(stream)
        stream = finish(layer, stream + attend(layer.self_attn, x, x, sees, (rope, rope)))
    return stream


def combined(drafter: Eagle3, hidden_states: Tensor) -> Tensor:
    """vLLM's combine_hidden_states (llama_eagle3.py), with RMSNorm written out."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + drafter.llama.rms_norm_eps).sqrt()

    weights = drafter.state_dict()
    if drafter.config.norm_before_fc:
        hidden_states = normed(hidden_states, weights["input_norm.weight"])
    if drafter.config.fc_norm:
        chunks = enumerate(hidden_states.split(D, -1))
        hidden_states = torch.cat(
            [normed(x, weights[f"fc_norm.{i}.weight"]) for i, x in chunks], -1
        )
    return drafter.fc(hidden_states)


# HASS


def aligned(drafter: Eagle, ctx: Context) -> list[Tensor]:
    """The outputs [P, D] of HASS's passes (main_hass.py, cnets_hass.py), but with -inf for masked
    scores: pass j sees true hidden states up to t - (j - 1), then one key of each earlier pass."""
    assert ctx.final_BTD is not None
    layer, h = drafter.layer, ctx.final_BTD[0, :P]
    e, place = drafter.embed(ctx.ids_BT[0, 1:]), torch.arange(P)
    inputs = [drafter.fc(torch.cat([e, h], -1))]  # the true hidden states, then those of each pass
    outputs: list[Tensor] = []
    cos, sin = factors(drafter, place)
    for j in range(1, K + 1):
        back = [j - 1 - i for i in range(j)]  # how far back the newest key of each input is
        age = place[:, None] - place
        sees = torch.cat([age >= back[0], *(age == b for b in back[1:])], -1)
        keys, rope = torch.cat(inputs), ((cos, sin), (cos.repeat(j, 1), sin.repeat(j, 1)))
        start = inputs[-1]
        outputs.append(finish(layer, start + attend(layer.self_attn, start, keys, sees, rope)))
        shifted = torch.cat([h[:1], outputs[-1][:-1]]).detach()
        inputs.append(drafter.fc(torch.cat([e, shifted], -1)))
    return outputs


def gradient(drafter: Recurrent, hidden_AKD: Tensor) -> Tensor:
    weight = torch.randn(hidden_AKD.shape, generator=torch.Generator().manual_seed(7)).double()
    trained = [p for p in drafter.parameters() if p.requires_grad]
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad((hidden_AKD * weight).sum(), trained)]
    )


def test_detached_depths_are_the_aligned_passes_of_hass(target: Target) -> None:
    """Position t of pass j is depth j - 1 at the anchor whose pair is t - (j - 1): outputs and
    gradients of all weights. Without `detach` only the outputs agree."""
    config = {"depth": K, "initialisation": "random"}
    drafter, through = (made(EagleConfig(**config, detach=d), target) for d in (True, False))
    ctx, last = read(target, drafter), P - K + 1  # pairs from which every pass has a position
    anchors = torch.arange(1, last + 1)[None]
    ours, other = (x.training_hidden(ctx, anchors, TrainingMoment())[0] for x in (drafter, through))
    assert isinstance(drafter, Eagle)
    passes = aligned(drafter, ctx)
    twin = torch.stack([x[j : j + last] for j, x in enumerate(passes)], 1)
    torch.testing.assert_close(ours, twin, atol=1e-9, rtol=1e-9)
    wanted = gradient(drafter, twin)
    torch.testing.assert_close(gradient(drafter, ours), wanted, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(other, twin, atol=1e-9, rtol=1e-9)
    assert (gradient(through, other) - wanted).norm() > 0.01 * wanted.norm()


# EAGLE-3.1


@pytest.mark.parametrize(
    "options",
    [
        {"norm_before_fc": True, "norm_before_residual": True},
        {"fc_norm": True, "norm_output": True},
        {"num_layers": 3, "norm_output": True},
    ],
    ids=lambda x: "+".join(x),
)
def test_options_of_eagle3_are_read_as_vllm_reads_them(
    target: Target, options: dict[str, object]
) -> None:
    """Every depth at one anchor, each from a whole pass over all pairs so far."""
    drafter = made(Eagle3Config(depth=K, draft_vocab=40, **options), target)  # type: ignore[arg-type]
    assert isinstance(drafter, Eagle3)
    ctx, a = read(target, drafter), 6
    assert ctx.layers_BTF is not None
    ours = drafter.unembed(drafter.hidden(ctx, torch.tensor([[a]]), None)[0, 0], 0)
    hidden_state = combined(drafter, ctx.layers_BTF[0, :a])
    for k in range(K):
        n = a + k
        sees = torch.ones(n, n, dtype=torch.bool).tril()
        tokens = ctx.ids_BT[0, 1 : n + 1]
        stream = stacked(drafter, tokens, hidden_state, torch.arange(n), sees)[-1:]
        normed = drafter.norm(stream)
        torch.testing.assert_close(ours[k], drafter.lm_head(normed)[0], atol=1e-5, rtol=1e-5)
        state_for_next_depth = normed if drafter.config.norm_output else stream
        hidden_state = torch.cat([hidden_state, state_for_next_depth])


def test_several_layers_start_as_the_targets_last_ones(target: Target) -> None:
    config = Eagle3Config(draft_vocab=None, num_layers=2)
    drafter = Eagle3.build(config, target)
    ours, theirs = drafter.state_dict(), target.layers
    for name, k in (("midlayer.", -2), ("layers.1.", -1)):
        wanted = theirs[k].mlp.up_proj.weight
        assert torch.equal(ours[f"{name}mlp.up_proj.weight"], wanted.to(ours["fc.weight"]))
    wanted = theirs[-1].self_attn.q_proj.weight
    assert torch.equal(ours["layers.1.self_attn.q_proj.weight"], wanted.to(ours["fc.weight"]))


@pytest.mark.parametrize("layout", ["hf", "speculators"])
def test_exports_of_the_options_have_the_names_that_vllm_reads(
    target: Target, tmp_path: Path, layout: str
) -> None:
    config = Eagle3Config(draft_vocab=40, num_layers=2, fc_norm=True, norm_output=True)
    drafter = made(config, target)
    draft_export.write_export(tmp_path / "out", drafter, target, layout)
    names = {n for n in load_file(tmp_path / "out" / draft_export.WEIGHTS) if "norm" in n}
    first = "midlayer." if layout == "hf" else "layers.0."
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    assert names == {
        "norm.weight",
        *(f"fc_norm.{i}.weight" for i in range(2)),
        *(f"{first}{n}.weight" for n in norms),
        *(f"layers.1.{n}.weight" for n in norms if n != "hidden_norm"),
    }
    described = json.loads((tmp_path / "out" / draft_export.CONFIG).read_text())
    options = ("norm_before_fc", "fc_norm", "norm_output")
    assert [described[n] for n in options] == [False, True, True]
    assert described.get("transformer_layer_config", described)["num_hidden_layers"] == 2


# P-EAGLE


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "norm_before_fc": True}], ids=str)
def test_peagle_is_one_pass_over_all_elements(target: Target, options: dict[str, object]) -> None:
    """Elements (A, d) in the order of the reference, with the mask of its attention.py. In
    training, depths that do not count are not computed; those that do are the same."""
    drafter = made(PEagleConfig(depth=K, draft_vocab=40, mask_token=5, **options), target)  # type: ignore[arg-type]
    assert isinstance(drafter, PEagle)
    ctx = read(target, drafter)
    assert ctx.layers_BTF is not None
    anchor = torch.arange(P).repeat(K)
    depth = torch.arange(K).repeat_interleave(P)
    tokens = torch.where(depth == 0, ctx.ids_BT[0, 1:].repeat(K), 5)
    real = ctx.layers_BTF[0, :P].repeat(K, 1)
    hidden_states = torch.where(depth[:, None] == 0, real, drafter.mask_hidden[0])
    earlier = (depth == 0) & (anchor <= anchor[:, None])
    own = (anchor == anchor[:, None]) & (depth <= depth[:, None])
    stream = stacked(
        drafter, tokens, combined(drafter, hidden_states), anchor + depth, earlier | own
    )
    wanted = stream.view(K, P, D).transpose(0, 1)
    anchors = torch.randperm(P, generator=torch.Generator().manual_seed(1))[None] + 1
    ours = drafter.hidden(ctx, anchors, None)[0]
    torch.testing.assert_close(ours, wanted[anchors[0] - 1], atol=1e-5, rtol=1e-5)

    kept = torch.tensor([3, 1, 2, 0, 3, 1, 1, 2, 1, 1, 2])  # depths of each anchor
    counted = torch.arange(K) < kept[:, None]
    some = drafter.training_hidden(ctx, anchors, TrainingMoment(counted_BAK=counted[None]))[0]
    torch.testing.assert_close(some[counted], ours[counted], atol=1e-5, rtol=1e-5)
    assert (some[5, 2] == 0).all()  # two of eleven anchors count at depth 2
    none = drafter.training_hidden(ctx, anchors, TrainingMoment(counted_BAK=counted[None] & False))
    assert none.shape == (1, P, K, D)


def test_cod_sampling_keeps_the_share_of_the_reference_and_the_expected_loss(
    target: Target,
) -> None:
    """Counts int((n - k) · max(.7^k, .2)); depths are nested; weights average 1. Over 400 draws the
    mean weight of one depth, which is 1/share with probability share, has a standard deviation
    of sqrt((1/share - 1) / 400), at most .112: the bound is 4.5 of them."""
    depth, n = 8, 60
    drafter = PEagle.build(PEagleConfig(depth=depth, draft_vocab=None, keep=0.7), target)
    valid = torch.zeros(80, depth, dtype=torch.bool)
    valid[10 : 10 + n] = True
    total = torch.zeros(80, depth)
    for seed in range(400):
        weight = drafter.anchors(valid, torch.Generator().manual_seed(seed))
        kept = weight > 0
        assert kept.sum(0).tolist() == [60, 41, 28, 19, 13, 11, 10, 10]
        assert (kept[:, 1:] <= kept[:, :-1]).all()
        total += weight
    assert (total[:10] == 0).all() and (total[70:] == 0).all()
    assert float((total[10:70] / 400 - 1).abs().max()) < 0.5
    every = PEagle.build(PEagleConfig(depth=depth, draft_vocab=None), target)
    assert torch.equal(every.anchors(valid, torch.Generator()) > 0, valid)


def test_the_papers_recipes_are_composed() -> None:
    config = compose(["experiment=peagle_paper"])
    wanted = {
        "depth": 8,
        "num_layers": 4,
        "keep": 0.7,
        "keep_least": 0.2,
        "initialisation": "random",
    }
    assert config.drafter == PEagleConfig(**wanted)  # type: ignore[arg-type]
    assert config.loss.terms == {"kl": 1.0}
    weights = [config.loss.weight(k) for k in range(8)]  # .7^5 is .168
    assert weights == pytest.approx([1, 0.7, 0.49, 0.343, 0.2401, 0.2, 0.2, 0.2])
    config = compose(["experiment=hass_paper"])
    assert config.drafter == EagleConfig(depth=3, initialisation="random", detach=True, noise=0.2)
    assert config.loss.terms == {"smooth_l1": 1.0, "soft_ce": 0.1, "top_k": 1.0}
    assert (config.loss.depth_decay, config.loss.constants) == (1.0, {})  # k = 10


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["drafter.norm_before_fc=true", "drafter.fc_norm=true"], "cannot be combined"),
        (["drafter=peagle", "drafter.norm_output=true"], "norm_output"),
        (["drafter=peagle", "drafter.keep=1.5"], r"drafter\.keep=1.5"),
    ],
)
def test_settings_that_contradict_each_other(given: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        compose(given)


def test_sizes_that_the_target_lacks(target: Target) -> None:
    with pytest.raises(UserError, match="only 6 layers"):
        Eagle3.build(Eagle3Config(num_layers=7, draft_vocab=None), target)
    with pytest.raises(UserError, match="mask_token=61: give 0 to 60"):
        PEagle.build(PEagleConfig(mask_token=61, draft_vocab=None), target)


def test_peagle_of_the_speculators_format_has_no_fc_norm(target: Target, tmp_path: Path) -> None:
    drafter = made(PEagleConfig(draft_vocab=40, fc_norm=True), target)
    with pytest.raises(UserError, match="only in the layout hf"):
        draft_export.write_export(tmp_path / "out", drafter, target, "speculators")
    assert "logits identical" in draft_export.write_export(tmp_path / "out", drafter, target)

"""Medusa's, Hydra's and the MLP speculator's heads against plain twins of the reference's formulas,
along chains and in trees, over batches of unequal rows.

Run alone: python -m pytest tests/drafters/test_heads.py (under 10 s)
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel

from specdec.context import Context, TrainingMoment
from specdec.drafters import Drafter
from specdec.drafters.base import Predictor
from specdec.drafters.hydra import Hydra, HydraHeadsConfig
from specdec.drafters.medusa import MedusaConfig
from specdec.drafters.mlp import MlpConfig
from specdec.errors import UserError
from specdec.targets.target import Target
from tests.tiny import architectures, compose, random_drafter, random_target

V, D, T = 61, 32, 24
KEPT = torch.arange(0, V, 2)  # the draft vocabulary
CONFIGS: dict[str, Any] = {
    "medusa": MedusaConfig(depth=3, draft_vocab=len(KEPT), num_layers=2, shared_head=False),
    "medusa, bias": MedusaConfig(depth=3, draft_vocab=None, bias=True),
    "hydra": HydraHeadsConfig(depth=3, draft_vocab=None, num_layers=3, shared_head=False),
    "hydra++": HydraHeadsConfig(depth=3, draft_vocab=len(KEPT), num_layers=2, prefix=True),
    "mlp": MlpConfig(depth=3, draft_vocab=None, inner_dim=20),
    "mlp, tied": MlpConfig(depth=3, draft_vocab=len(KEPT), tie_weights=True, scale_input=True),
}


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(architectures(V, 4)["llama"])
    target.model.double()
    return target


def drafter_of(config: Any, target: Target, noise: float = 0.1) -> Drafter:
    drafter = random_drafter(config, target, noise, KEPT).double()
    drafter.attach(target)
    return drafter


@pytest.fixture(params=list(CONFIGS))
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    return drafter_of(CONFIGS[request.param], target)


# The twins: the target's final states before the anchor [a, D], and the tokens from the anchor on


def numbered(drafter: Drafter, name: str, k: int) -> Tensor:
    """The tensor of depth k, or the last one where depths share it."""
    state = drafter.state_dict()
    found = {int(n.split(".")[1]) for n in state if n.startswith(name.split("{")[0])}
    return state[name.format(min(k, max(found)))]


def of_medusa(drafter: Drafter, before: Tensor, tokens: list[int]) -> Tensor:
    x, k, state = before[-1], len(tokens) - 1, drafter.state_dict()
    for i in range(drafter.config.num_layers):
        name = f"blocks.{k}.layers.{i}"
        bias = state[f"{name}.bias"] if drafter.config.bias else 0
        x = x + silu(state[f"{name}.weight"] @ x + bias)
    return numbered(drafter, "lm_heads.{}.weight", k) @ x


def of_hydra(drafter: Drafter, before: Tensor, tokens: list[int], target: Target) -> Tensor:
    """prefix_mlp_head.py, its prefix a LlamaModel of one layer that is given embeddings."""
    h, k, state = before[-1], len(tokens) - 1, drafter.state_dict()
    if drafter.config.prefix:
        config = LlamaConfig(**drafter.sizes.llama, num_hidden_layers=1)
        model = LlamaModel(config).double().eval()
        own = {n[len("prefix.") :]: x for n, x in state.items() if n.startswith("prefix.")}
        lost = model.load_state_dict(own, strict=False)
        assert not lost.unexpected_keys and lost.missing_keys == ["embed_tokens.weight"]
        with torch.no_grad():
            h = model(inputs_embeds=before[None]).last_hidden_state[0, -1]
    x = torch.cat([h, *target.embedding.weight.detach()[tokens]])
    assert len(x) == (k + 2) * D

    def through(name: str) -> Tensor:
        return linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    x = through(f"skips.{k}") + silu(through(f"blocks.{k}.0"))
    for i in range(1, drafter.config.num_layers):
        x = x + silu(through(f"blocks.{k}.{i}"))
    weight, bias = (numbered(drafter, f"lm_heads.{{}}.{part}", k) for part in ("weight", "bias"))
    return weight @ x + bias


def of_mlp(drafter: Drafter, before: Tensor, tokens: list[int]) -> Tensor:
    """fms_extras' speculator.py, `generate_suffixes`."""
    s, n = before[-1], drafter.config.depth
    if drafter.config.scale_input:
        s = s / (s.pow(2).mean() + 1e-6).sqrt() / 2**0.5
    state_weight = 0.5 ** (0.5 / n)
    emb_weight = math.sqrt(1 - state_weight**2)
    for i, token in enumerate(tokens):
        z = numbered(drafter, "emb.{}.weight", i)[token]
        s = numbered(drafter, "proj.{}.weight", i) @ s * state_weight
        s = s + z * (emb_weight * math.sqrt(len(z) / 2))
        s = s / (s.pow(2).mean() + 1e-6).sqrt()
        s = numbered(drafter, "ln.{}.weight", i) * s + numbered(drafter, "ln.{}.bias", i)
        s = s * (1 + torch.erf(s / 2**0.5)) / 2
    return numbered(drafter, "lm_heads.{}.weight", len(tokens) - 1) @ s


def twin(
    drafter: Drafter, target: Target, ctx: Context, b: int, a: int, after: list[int]
) -> Tensor:
    """Logits after the tokens drafted after the anchor a of row b."""
    assert ctx.final_BTD is not None
    before, tokens = ctx.final_BTD[b, :a], [int(ctx.ids_BT[b, a]), *after]
    if drafter.config.name == "hydra":
        return of_hydra(drafter, before, tokens, target)
    return {"medusa": of_medusa, "mlp": of_mlp}[drafter.config.name](drafter, before, tokens)


def texts(target: Target, drafter: Drafter) -> Context:
    ids_BT = torch.randint(2, V, (2, T), generator=torch.Generator().manual_seed(0))
    return target.hidden_states(ids_BT, drafter.needs)[0]


def test_chains_are_the_references(target: Target, drafter: Drafter) -> None:
    ctx, anchors = texts(target, drafter), torch.tensor([[3, 9], [17, 1]])
    drafted = torch.randint(0, V, (2, 2, 2), generator=torch.Generator().manual_seed(1))
    hidden = drafter.hidden(ctx, anchors, drafted)
    forced = drafter.hidden(ctx, anchors, None)
    for b, i, k in torch.cartesian_prod(*map(torch.arange, (2, 2, 3))).tolist():
        a = int(anchors[b, i])
        wanted = twin(drafter, target, ctx, b, a, drafted[b, i, :k].tolist())
        torch.testing.assert_close(drafter.unembed(hidden[b, i, k], k), wanted)
        own = twin(drafter, target, ctx, b, a, ctx.ids_BT[b, a + 1 : a + 1 + k].tolist())
        torch.testing.assert_close(drafter.unembed(forced[b, i, k], k), own)


def test_trees_are_the_references(target: Target, drafter: Drafter) -> None:
    """Speculation steps as a decoder has them, with a cache if the family keeps one: rows of
    unequal lengths, another tree in each row, and the default that reads every path from its start
    agrees."""
    whole, cache = texts(target, drafter), drafter.new_cache()
    for ends in ([5, 8], [6, 8], [11, 9], [20, 12]):
        assert whole.final_BTD is not None
        final = whole.final_BTD[:, : max(ends) - 1].clone()
        for b, end in enumerate(ends):
            final[b, end - 1 :] = 99.0  # padding
        ctx = Context(whole.ids_BT[:, : max(ends)], None, final, lengths=ends)
        levels = [
            (torch.tensor([[4, 7], [9, 2]]), torch.tensor([[-1, -1], [-1, -1]])),
            (torch.tensor([[5, 8, 3], [1, 6, 2]]), torch.tensor([[1, 0, 1], [0, 0, 1]])),
        ]
        fast, plain = drafter.draft_growth(ctx, cache), Predictor.draft_growth(drafter, ctx)
        paths: list[list[list[int]]] = [[[]], [[]]]
        with torch.no_grad():
            found = [fast.logits_BS[:, None], *(fast.grow(*level) for level in levels)]
            again = [plain.logits_BS[:, None], *(plain.grow(*level) for level in levels)]
        for b, end in enumerate(ends):
            for tokens, parents in levels:
                paths[b] += [
                    [*paths[b][parent + 1], token]
                    for token, parent in zip(tokens[b].tolist(), parents[b].tolist(), strict=True)
                ]
            wanted = [twin(drafter, target, whole, b, end - 1, path) for path in paths[b]]
            assert [len(path) for path in paths[b]] == [0, 1, 1, 2, 2, 2]
            for ways in (found, again):
                torch.testing.assert_close(torch.cat(ways, 1)[b], torch.stack(wanted))
        if cache is not None:
            assert cache.lengths == [end - 1 for end in ends]  # committed positions only
            assert cache.scratch == 0


def test_a_chain_goes_on_from_the_node_that_grew_last(target: Target, drafter: Drafter) -> None:
    ctx = texts(target, drafter)
    growth, tokens = drafter.draft_growth(ctx, drafter.new_cache()), torch.tensor([[4, 7], [9, 2]])
    for k in range(2):
        logits = growth.grow(tokens[:, k : k + 1], None)
        for b in range(2):
            wanted = twin(drafter, target, ctx, b, T - 1, tokens[b, : k + 1].tolist())
            torch.testing.assert_close(logits[b, 0], wanted)


# Where training starts


def test_mlp_starts_as_the_reference_does(target: Target) -> None:
    """All weights from N(0, 1/D) with D the width of the state: 0.2236 for 20. With 1,220 numbers
    in an embedding the sample's deviation is within 9 % (more than four standard errors)."""
    state = drafter_of(CONFIGS["mlp"], target, noise=0.0).state_dict()
    assert state["proj.0.weight"].shape == (20, D) and state["proj.1.weight"].shape == (20, 20)
    for name, x in state.items():
        if name.startswith(("emb", "lm_heads")):
            assert float(x.std()) == pytest.approx(20**-0.5, rel=0.09)
        elif name.startswith("ln"):
            assert torch.equal(x, torch.full_like(x, float("weight" in name)))


def test_hydra_and_medusa_start_from_the_targets_head(target: Target) -> None:
    """W is zero, so a layer of Medusa adds only SiLU(b), and nothing without the bias; Hydra's S
    and all biases are as torch draws them, within 1/√(inputs)."""
    for name in ("hydra++", "medusa", "medusa, bias"):
        drafter = drafter_of(CONFIGS[name], target, noise=0.0)
        state, rows = drafter.state_dict(), slice(None) if drafter.vocab_S is None else KEPT
        assert torch.equal(state["lm_heads.0.weight"], target.head.weight[rows])
        for key, x in state.items():
            if key.startswith("blocks") and key.endswith("weight"):
                assert not x.any()
            elif key.endswith("bias") or key.startswith("skips"):
                assert 0 < float(x.abs().max()) <= D**-0.5
    plain = drafter_of(CONFIGS["medusa"], target, noise=0.0)
    ctx = texts(target, plain)
    assert ctx.final_BTD is not None
    started = plain.hidden(ctx, torch.tensor([[5], [9]]), None)[:, 0]
    for b, a in enumerate((5, 9)):
        torch.testing.assert_close(started[b], ctx.final_BTD[b, a - 1].expand(3, -1))


# Dropout


def test_dropout_is_on_every_layers_input_and_on_the_heads(target: Target) -> None:
    """With S = [1 0 …] and W = b = 0, two layers and a head pass h on, so each number is 0 or
    h/0.8³, and is kept with probability 0.8³ = .512: of 2 · 23 · 32 numbers at depth 0, within .05
    (almost four standard errors)."""
    config = HydraHeadsConfig(depth=2, num_layers=2, draft_vocab=None, dropout=0.2)
    drafter = drafter_of(config, target, noise=0.0)
    assert isinstance(drafter, Hydra)
    with torch.no_grad():
        for layer in drafter.blocks.parameters():
            layer.zero_()
        for skip in drafter.skips.parameters():
            skip.zero_()
            if skip.ndim == 2:
                skip[:, :D] = torch.eye(D)
    ctx, anchors = texts(target, drafter), torch.arange(1, T).expand(2, -1)
    assert ctx.final_BTD is not None
    found = drafter.training_hidden(ctx, anchors, TrainingMoment(seeds=[5, 6]))
    ratio = found / ctx.final_BTD[:, : T - 1, None]
    assert bool(((ratio == 0) | ((ratio - 0.8**-3).abs() < 1e-9)).all())
    for k in range(2):
        assert float((ratio[:, :, k] != 0).double().mean()) == pytest.approx(0.512, abs=0.05)
    torch.testing.assert_close(drafter.hidden(ctx, anchors, None)[:, :, 0], ctx.final_BTD[:, :-1])


def test_dropout_follows_from_each_rows_seed(target: Target) -> None:
    """However rows are spread over batches; another seed drops other numbers."""
    config = HydraHeadsConfig(depth=2, prefix=True, draft_vocab=None, dropout=0.5)
    drafter = drafter_of(config, target)
    ctx, anchors = texts(target, drafter), torch.tensor([[3, 9], [5, 20]])
    assert ctx.final_BTD is not None
    both = drafter.training_hidden(ctx, anchors, TrainingMoment(seeds=[5, 6]))
    alone = Context(ctx.ids_BT[1:], None, ctx.final_BTD[1:])
    for seed, same in ((6, True), (5, False)):
        one = drafter.training_hidden(alone, anchors[1:], TrainingMoment(seeds=[seed]))
        assert torch.allclose(one[0], both[1]) == same


# Settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["drafter=mlp", "drafter.tie_weights=true", "drafter.depth=1"], "depth=2 or more"),
        (["drafter=hydra", "drafter.dropout=1.0"], r"drafter\.dropout=1\.0"),
    ],
)
def test_settings_that_no_head_can_have(given: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        compose(given)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("mlp", {"inner_dim": 0}), ("hydra", {"num_layers": 0}), ("medusa", {"num_layers": 65})],
)
def test_sizes_that_no_head_can_have(target: Target, name: str, settings: dict[str, int]) -> None:
    kinds = {"mlp": MlpConfig, "hydra": HydraHeadsConfig, "medusa": MedusaConfig}
    with pytest.raises(UserError, match=rf"drafter\.{next(iter(settings))}="):
        drafter_of(kinds[name](**settings), target)  # type: ignore[operator]

"""A closed-form initialisation: least squares, and what drafts make of it.

Run alone: python -m pytest tests/drafters/test_closed_form.py
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

import train.initialisation
from specdec.context import Context, KnownAnchors
from specdec.drafters import DRAFTERS
from specdec.drafters.base import initialisations_of
from specdec.drafters.eagle import EagleConfig
from specdec.drafters.eagle3 import Eagle3, Eagle3Config
from specdec.drafters.hydra import Hydra, HydraHeadsConfig
from specdec.drafters.mlp import MlpConfig
from specdec.drafters.mtp import MTPConfig
from specdec.drafters.recurrence import RIDGE, Squares, low_rank, ridge
from specdec.errors import UserError
from specdec.forcing.anchors import anchors_of
from specdec.formats import draft_checkpoint
from specdec.targets.target import Target
from tests.tiny import Tiny, architectures, random_target
from train.data.sequences import Document
from train.hidden_states.batches import OnlineBatches
from train.initialisation import InitialisationConfig, initial_drafter

V, ROWS, LENGTH = 61, 24, 96


def test_ridge_is_least_squares_with_a_penalty_that_ignores_the_scale_of_an_input() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(400, 7), torch.randn(400, 3)
    squares = Squares()
    for rows in (slice(0, 150), slice(150, None)):
        squares.add(x[rows], y[rows])
    # the same as rows of the penalty below the data
    more = (RIDGE * x.double().square().sum(0)).sqrt().diag()
    data = torch.cat([x.double(), more]), torch.cat([y.double(), torch.zeros(7, 3).double()])
    expected = torch.linalg.lstsq(*data).solution
    torch.testing.assert_close(ridge(squares.xx, squares.xy), expected, rtol=1e-5, atol=1e-6)
    scaled = Squares()
    scaled.add(x * 1000, y)
    torch.testing.assert_close(ridge(scaled.xx, scaled.xy) * 1000, expected, rtol=1e-4, atol=1e-5)
    assert squares.rows == 400


def test_an_input_that_is_always_zero_gets_no_weight() -> None:
    x, y = torch.randn(50, 4), torch.randn(50, 2)
    x[:, 2] = 0
    squares = Squares()
    squares.add(x, y)
    assert ridge(squares.xx, squares.xy)[2].abs().max() == 0


def test_low_rank_is_the_best_of_its_rank_on_the_rows() -> None:
    """Beside the truncated SVD of the weights themselves, which ignores the rows, and beside
    products nearby."""
    torch.manual_seed(0)
    x = (torch.randn(300, 9) * torch.tensor([9.0, 5, 3, 2, 1, 1, 0.5, 0.2, 0.1])).double()
    weight = torch.randn(9, 6).double()

    def error(product: Tensor) -> float:
        return float((x @ (product - weight)).square().sum())

    inner, outer = low_rank(weight, x.T @ x, 2)
    assert inner.shape == (9, 2) and outer.shape == (2, 6)
    best = error(inner @ outer)
    left, size, right = torch.linalg.svd(weight, full_matrices=False)
    assert best < 0.9 * error(left[:, :2] * size[:2] @ right[:2])
    for _ in range(20):
        moved = [f + 0.01 * torch.randn_like(f) for f in (inner, outer)]
        assert error(moved[0] @ moved[1]) > best
    torch.testing.assert_close(torch.mm(*low_rank(weight, x.T @ x, 6)), weight)


WIDE = LlamaConfig(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    tie_word_embeddings=True,
)


def agreement(drafter: Eagle3, known: KnownAnchors) -> list[float]:
    """The mean cosine of what each of two depths puts out and what the target comes to, at anchors
    with a text before them, by the forward pass of training."""
    rows = len(known.final_BTD)
    at_BA = known.position_N.view(rows, -1)
    with torch.no_grad():
        hidden_BAKD = drafter.hidden(known.ctx, at_BA, None)
    out_NKD = drafter.norm(hidden_BAKD).flatten(0, 1)[:, :2]
    found = []
    for k in range(2):
        final_ND = known.final_BTD[known.row_N, known.position_N + k]
        found.append(float(torch.cosine_similarity(out_NKD[:, k].detach(), final_ND, -1).mean()))
    return found


def read_tokens(seed: int) -> Context:
    generator = torch.Generator().manual_seed(seed)
    return Context(torch.randint(2, V, (ROWS, LENGTH), generator=generator))


def anchors() -> tuple[Tensor, Tensor]:
    """Row and position of anchors with enough text before and after them."""
    position_T = torch.arange(2, LENGTH - 3)
    return torch.arange(ROWS).repeat_interleave(len(position_T)), position_T.repeat(ROWS)


def read(drafter: Eagle3, seed: int) -> KnownAnchors:
    """Random hidden states and tokens, and final states that are linear in the hidden states of the
    token before, 0.7 times, and in the embedding of the token, 0.7 times, in half of its
    directions."""
    generator, made = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(7)
    ids_BT = read_tokens(seed).ids_BT
    hidden_states_BTF = torch.randn(ROWS, LENGTH, 3 * 64, generator=generator) * 5
    maps = torch.randn(3 * 64, 64, generator=made), torch.randn(64, 64, generator=made)
    maps[1][:, 32:] = 0
    parts = hidden_states_BTF.roll(1, 1) @ maps[0], drafter.embed(ids_BT) @ maps[1]
    final_BTD = sum((0.7 * x / x.square().mean().sqrt() for x in parts), torch.zeros(()))
    return KnownAnchors(Context(ids_BT, layers_BTF=hidden_states_BTF), final_BTD, *anchors())


@pytest.mark.parametrize(
    "options",
    [{}, {"fc_norm": True}, {"norm_before_residual": True, "norm_output": True}, {"num_layers": 2}],
    ids=str,
)
def test_a_head_starts_as_the_linear_draft_of_what_it_reads(options: dict[str, Any]) -> None:
    """Depth 0 can know its state whole, depth 1 only the half that the token tells."""
    target = random_target(WIDE)
    found = {}
    for start in ("target", "closed_form"):
        config = Eagle3Config(
            layers=[1, 2, 3], draft_vocab=None, initialisation=start, depth=2, **options
        )
        torch.manual_seed(0)
        drafter = Eagle3.build(config, target).float()
        if drafter.closed_form_initialisation:
            with torch.no_grad():
                drafter.solve_closed_form(
                    lambda drafter=drafter: [read(drafter, seed) for seed in range(6)]
                )
        found[start] = agreement(drafter, read(drafter, 99))
    assert found["closed_form"][0] > 0.8 and found["target"][0] < 0.3, found
    assert found["closed_form"][1] > 0.45 and found["target"][1] < 0.3, found


def read_states(target: Target, seed: int) -> KnownAnchors:
    """States that turn and take in the next token, so that every depth can predict its own."""
    turn_DD = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(3)))[0]
    map_DD = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    ids_BT = read_tokens(seed).ids_BT
    taken_BTD = target.embedding(ids_BT).float() @ map_DD
    taken_BTD = taken_BTD / taken_BTD.square().mean().sqrt()
    steps = [taken_BTD[:, 0]]
    for t in range(1, LENGTH):
        steps.append(0.7 * steps[-1] @ turn_DD + 0.7 * taken_BTD[:, t])
    final_BTD = torch.stack(steps, 1)
    return KnownAnchors(Context(ids_BT, final_BTD=final_BTD), final_BTD, *anchors())


@pytest.mark.parametrize(
    ("config", "least"),
    [
        (EagleConfig(), 0.9),
        (MTPConfig(), 0.9),
        (MTPConfig(modules=3), 0.9),
        (HydraHeadsConfig(draft_vocab=None), 0.95),
        (HydraHeadsConfig(draft_vocab=None, prefix=True, num_layers=2), 0.9),
        (MlpConfig(draft_vocab=None), 0.7),  # GELU is not quite linear
        (MlpConfig(draft_vocab=None, inner_dim=96), 0.75),
        (MlpConfig(draft_vocab=None, inner_dim=48, scale_input=True), 0.5),  # it is too narrow
        (MlpConfig(draft_vocab=None, tie_weights=True), 0.7),
    ],
    ids=str,
)
def test_a_draft_starts_as_the_linear_recurrence_of_the_states(config: Any, least: float) -> None:
    """The likeliest token is the target's, at every depth, more often than with the other start."""
    target, found = random_target(WIDE), {}
    family = DRAFTERS[config.name]
    for start in initialisations_of(config)[:2]:
        torch.manual_seed(0)
        drafter = family.build(replace(config, initialisation=start), target).float()
        if drafter.closed_form_initialisation:
            with torch.no_grad():
                drafter.solve_closed_form(lambda: [read_states(target, seed) for seed in range(6)])
        known = read_states(target, 99)
        hidden_BAKD = drafter.hidden(known.ctx, known.position_N.view(ROWS, -1), None)
        found[start] = []
        for k in range(drafter.depth):
            ours = drafter.unembed(hidden_BAKD[:, :, k].flatten(0, 1), k).argmax(-1)
            theirs = target.logits(known.wanted(k).to(target.dtype)).argmax(-1)
            found[start].append(float((ours == theirs).float().mean()))
    assert min(found["closed_form"]) > least and max(found[initialisations_of(config)[1]]) < 0.3, (
        found
    )


def test_hydras_start_is_read_where_all_its_depths_have_tokens(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[KnownAnchors] = []
    monkeypatch.setattr(Hydra, "solve_closed_form", lambda _, known: seen.extend(known()))
    tiny.job(tmp_path / "run", "hydra", "drafter.depth=4")
    assert seen
    for some in seen:
        document_BT = some.ctx.documents()[1]
        of_anchor_N = document_BT[some.row_N, some.position_N]
        assert torch.equal(document_BT[some.row_N, some.position_N + 4], of_anchor_N)


def test_a_norm_that_adds_one_to_its_weight_starts_with_finite_weights() -> None:
    """Gemma's stores 0 at first, and dividing by that made no finite weight."""
    target = random_target(architectures(V, 4)["gemma2"])
    config = Eagle3Config(layers=[1, 2, 3], draft_vocab=None, depth=2)
    drafter = Eagle3.build(config, target).float()
    drafter.attach(target)
    ids_BT = read_tokens(0).ids_BT
    with torch.no_grad():
        ctx, final_BTD = target.hidden_states(ids_BT, drafter.needs)
        drafter.solve_closed_form(lambda: [KnownAnchors(ctx, final_BTD, *anchors())])
        at_BA = anchors()[1].view(ROWS, -1)
        out_NKD = drafter.norm(drafter.hidden(ctx, at_BA, None)).flatten(0, 1)
    size = final_BTD.square().mean().sqrt()
    assert 0.5 < float(out_NKD[:, 0].square().mean().sqrt() / size) < 2
    assert all(x.isfinite().all() for x in drafter.parameters())


def test_responses_too_short_for_least_squares_are_no_error(tiny: Tiny, tmp_path: Path) -> None:
    """One token of each response counts: there is no pair of known states."""
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eagle3, "solve_closed_form", lambda *_: made.append(1))
        patch.setattr(train.initialisation, "anchors_of", lambda *args: anchors_of(*args[:3], 500))
        tiny.job(tmp_path / "run", "eagle3")
    assert not made


def test_a_draft_that_is_trained_further_keeps_the_rates_of_its_start(
    tiny: Tiny, tmp_path: Path
) -> None:
    config, target = tiny.config("eagle3"), random_target(WIDE)
    earlier = Eagle3Config(layers=[1, 2, 3], draft_vocab=None, initialisation="target")
    draft_checkpoint.write_draft(tmp_path, Eagle3.build(earlier, target), target)
    config = replace(earlier, initialisation="closed_form")
    documents = [Document("a", np.arange(9, dtype=np.int32), np.ones(9, bool))]
    state_for_next_depth = initial_drafter(
        InitialisationConfig(str(tmp_path)), config, target, documents, 0
    )
    assert (
        state_for_next_depth.config.initialisation == "target"
        and not state_for_next_depth.learning_rates
    )
    fresh = initial_drafter(InitialisationConfig(), config, target, documents, 0)
    assert fresh.learning_rates == {"fc.*": 0.03}


def test_the_same_texts_give_the_same_start() -> None:
    target = random_target(WIDE)
    config = Eagle3Config(layers=[1, 2, 3], draft_vocab=None)
    states = []
    for seed in (0, 0):
        torch.manual_seed(seed)
        drafter = Eagle3.build(config, target).float()
        torch.rand(seed + 5)  # numbers drawn elsewhere
        with torch.no_grad():
            drafter.solve_closed_form(lambda drafter=drafter: [read(drafter, 1)])
        states.append(drafter.state_dict())
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def test_a_run_starts_in_closed_form_and_not_again(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of eagle3. With a learning rate that moves nothing, the draft is the start."""
    made = []
    plain = Eagle3.solve_closed_form

    def counted(self: Eagle3, known: Callable[[], Iterable[KnownAnchors]]) -> None:
        plain(self, known)
        made.append(sum(len(x.row_N) for x in known()))

    monkeypatch.setattr(Eagle3, "solve_closed_form", counted)
    tiny.job(tmp_path / "run", "eagle3", "optim.lr=1e-30")
    assert len(made) == 1 and made[0] > 100
    weights = load_file(tmp_path / "run" / "best" / "draft.safetensors")
    D = weights["norm.weight"].shape[0]
    assert weights["midlayer.self_attn.q_proj.weight"][:, D:].abs().max() < 1e-20  # 0 at the start
    tiny.job(tmp_path / "run", "eagle3", "optim.lr=1e-30")  # it is finished, and not trained again
    tiny.job(tmp_path / "other", "eagle3", "drafter.initialisation=target")
    tiny.job(tmp_path / "state_for_next_depth", "eagle3", f"drafter.from={tmp_path}/run/best")
    assert len(made) == 1


@pytest.mark.parametrize(("bytes_kept", "reads"), [(2**30, 1), (0, 5)])
def test_without_a_cache_the_target_reads_the_texts_of_the_start_once(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_kept: int, reads: int
) -> None:
    """Unless there is no room to remember them. Then the first rows are also read to see if they
    have any anchors."""
    read: list[int] = []
    batch, plain = OnlineBatches.batch, Eagle3.solve_closed_form
    monkeypatch.setattr(train.initialisation, "REMEMBERED", bytes_kept)
    monkeypatch.setattr(OnlineBatches, "batch", lambda self, x: (read.extend(x), batch(self, x))[1])

    def closed_form_depths(self: Eagle3, known: Callable[[], Iterable[KnownAnchors]]) -> None:
        plain(self, known)
        assert max(read.count(row) for row in set(read)) == reads

    monkeypatch.setattr(Eagle3, "solve_closed_form", closed_form_depths)
    tiny.job(tmp_path / "run", "eagle3", "hidden_states.mode=online")
    assert read


def test_the_factors_of_the_start_reach_the_optimiser(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[float] = set()
    adamw = torch.optim.AdamW.step

    def look(self: torch.optim.AdamW, *args: Any) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        used.update(round(rate / max(rates), 6) for rate in rates)
        return adamw(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", look)
    tiny.job(tmp_path / "run", "eagle3")
    assert used == {0.03, 1.0}


def test_the_learning_rate_is_the_familys_own_unless_it_is_given(tiny: Tiny) -> None:
    for drafter, given, expected in (
        ("eagle3", ["optim.lr=null"], 3e-4),
        ("eagle3", ["optim.lr=null", "drafter.initialisation=target"], 1e-3),
        ("medusa", ["optim.lr=null"], 1e-3),
        ("eagle3", ["optim.lr=7e-4"], 7e-4),
    ):
        assert tiny.config(drafter, *given).optim.lr == expected


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_states_that_are_not_finite_start_nothing(value: float) -> None:
    squares = Squares()
    squares.add(torch.eye(3), torch.ones(3, 2))
    squares.add(torch.tensor([[1.0, value, 0.0]]), torch.ones(1, 2))
    with pytest.raises(UserError, match="not finite numbers on the training texts"):
        ridge(squares.xx, squares.xy)

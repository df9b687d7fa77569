"""Falcon: blocks and glancing by plain twins of the paper's formulas.

Run alone: python -m pytest tests/lab/drafters/test_falcon.py (about 15 s)
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.context import Context, TrainingMoment
from specdec.errors import UserError
from specdec.lab.drafters.falcon import Falcon, FalconConfig
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Shape, Static
from specdec.targets.target import Target
from tests.drafters.plain import attended, key_value, lstm, mlp, rms
from tests.runs import require_learning
from tests.tiny import Tiny, architectures, compose, random_drafter, random_target

V, D, Dh, T = 61, 32, 8, 14
IDS = torch.randint(2, V, (1, T), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(architectures(V, 6)["llama"])
    target.model.double()
    return target


def falcon(target: Target, **config: Any) -> Falcon:
    drafter = random_drafter(FalconConfig(**config), target, 0.1).double()
    drafter.attach(target)
    assert isinstance(drafter, Falcon)
    return drafter


def read(target: Target, drafter: Falcon) -> Context:
    ctx, _ = target.hidden_states(IDS, drafter.needs)
    assert ctx.final_BTD is not None
    return ctx


def forecasts(
    drafter: Falcon, pairs: list[tuple[Tensor, Tensor]], tokens: list[Tensor], depths: int
) -> list[Tensor]:
    """The states [D] of depths 0 … after these pairs (e(x_{t+1}), h_t) of a text, t = 0 … a - 1.
    `tokens` are the embeddings of the tokens drafted after the anchor."""
    w = {n.removeprefix("layers.0."): x for n, x in drafter.state_dict().items()}
    w |= {n.replace("fc.", "lstm."): x for n, x in w.items() if n.startswith("fc.")}
    entered = [torch.cat(pair) for pair in pairs]
    read = [lstm(w, [entered[max(0, t - 1)], x]) for t, x in enumerate(entered)]
    cache = [key_value(w, x, t, Dh) for t, x in enumerate(read)]

    def state(x: Tensor, t: int) -> Tensor:
        stream = x + attended(w, x, t, cache)
        return stream + mlp(w, rms(stream, w["post_attention_layernorm.weight"]))

    a = len(pairs)
    found = [state(read[max(0, t)], max(0, t)) for t in (a - 2, a - 1)]
    while len(found) < depths:
        for e, h in zip(tokens[len(found) - 2 : len(found)], found[-2:], strict=True):
            entered.append(torch.cat([e, h]))
            x = lstm(w, entered[-2:])
            read.append(x)
            cache.append(key_value(w, x, len(cache), Dh))
        found += [state(x, len(cache) - 2 + j) for j, x in enumerate(read[-2:])]
    return found[:depths]


def pairs_of(target: Target, ctx: Context, count: int) -> list[tuple[Tensor, Tensor]]:
    assert ctx.final_BTD is not None
    return [(target.embedding.weight[IDS[0, t + 1]], ctx.final_BTD[0, t]) for t in range(count)]


@pytest.mark.parametrize("depths", [1, 2, 3, 6])
def test_a_block_is_forecast_at_once_and_read_by_the_next(target: Target, depths: int) -> None:
    """Query t = a - 2 + j forecasts the state of a + j and sees every pair up to a - 1; anchor 1
    has one pair, which stands for both. The target's head reads the states."""
    drafter = falcon(target, depth=depths)
    ctx, anchors = read(target, drafter), [1, 2, 5, 6]
    found = drafter.hidden(ctx, torch.tensor([anchors]), None)[0]
    for i, a in enumerate(anchors):
        tokens = list(target.embedding.weight[IDS[0, a + 1 : a + depths]])
        wanted = torch.stack(forecasts(drafter, pairs_of(target, ctx, a), tokens, depths))
        torch.testing.assert_close(found[i], wanted, atol=1e-6, rtol=1e-6)  # float32 angles
    logits = drafter.unembed(found, 0)
    torch.testing.assert_close(logits, found @ target.head.weight.T, atol=1e-9, rtol=1e-9)


# glancing


def glanced(target: Target, drafter: Falcon, a: int, revealed: list[int], depths: int) -> Tensor:
    """The states at anchor a, where for each b in `revealed` the block of anchor b begins with the
    pair (x_{b+1}, h_b) instead of (x_{b-1}, h_{b-2})."""
    ctx = read(target, drafter)
    pairs = pairs_of(target, ctx, T - 1)
    shown = list(pairs)
    for b in revealed:
        shown[b - 2] = pairs[b]
    tokens = list(target.embedding.weight[IDS[0, a + 1 : a + depths]])
    return torch.stack(forecasts(drafter, shown[:a], tokens, depths))


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_glancing_reveals_a_share_of_the_wrong_forecasts(target: Target, progress: float) -> None:
    """N = .4 (1 - e/E) times the wrong argmaxes of the first pass, over the depths that count; the
    N blocks are the first of a permutation with the row's seed. Only whole blocks can be revealed,
    so not anchor 1's, nor where depth 0 does not count."""
    drafter = falcon(target, depth=4)
    ctx, anchors = read(target, drafter), [1, 3, 5, 7, 9]
    counted = torch.ones(1, 5, 4, dtype=torch.bool)
    counted[0, 3] = False
    counted[0, 4, 1:] = False
    wrong = 0
    for i, a in enumerate(anchors):
        states = forecasts(drafter, pairs_of(target, ctx, a), [], 2)
        for j, state in enumerate(states):
            assert ctx.final_BTD is not None
            truth = (target.head.weight @ ctx.final_BTD[0, a + j]).argmax()
            wrong += int((target.head.weight @ state).argmax() != truth) * int(counted[0, i, j])
    able = [3, 5, 9]
    order = torch.randperm(3, generator=torch.Generator().manual_seed(11)).tolist()
    revealed = [able[i] for i in order][: int(0.4 * (1 - progress) * wrong)]
    assert len(revealed) == {0.0: 2, 0.3: 1, 1.0: 0}[progress]
    moment = TrainingMoment(progress, [11], counted)
    found = drafter.training_hidden(ctx, torch.tensor([anchors]), moment)[0]
    for i, a in enumerate(anchors):
        wanted = glanced(target, drafter, a, revealed, 4)
        torch.testing.assert_close(found[i], wanted, atol=1e-6, rtol=1e-6)
    plain = drafter.hidden(ctx, torch.tensor([anchors]), None)[0]
    assert torch.allclose(found, plain) == (not revealed)


def test_noise_is_on_what_is_read_and_not_on_what_is_revealed(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = falcon(target, depth=2, noise=0.2, glance=1.0)
    ctx = read(target, drafter)
    place, document = torch.arange(T)[None], torch.zeros(1, T, dtype=torch.long)
    ctx = replace(ctx, position_BT=place, document_BT=document)
    seen: list[Context] = []
    inner = drafter.hidden

    def hidden(ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        seen.append(ctx)
        return inner(ctx, anchors_BA, drafted_BAK)

    monkeypatch.setattr(drafter, "hidden", hidden)
    drafter.training_hidden(ctx, torch.tensor([[4, 6, 8]]), TrainingMoment(0.0, [3]))
    first, trained = (x.final_BTD[0] - ctx.final_BTD[0] for x in seen)  # type: ignore[index]
    width = 0.1 * 512 / T
    assert width / 2 < first.abs().max() <= width
    moved = [t for t in range(T) if not torch.equal(first[t], trained[t])]
    assert moved and set(moved) <= {2, 4, 6}
    for t in moved:
        assert ctx.final_BTD is not None and seen[1].final_BTD is not None
        assert torch.equal(seen[1].final_BTD[0, t], ctx.final_BTD[0, t + 2])


def test_glancing_in_bfloat16_leaves_every_weight_its_gradient() -> None:
    """Autocast keeps the casts made in the first pass; in older torch, no gradient passes through
    them (pytorch/pytorch#165068): run with --oldest. A CPU with AVX2 alone has no LSTM in
    bfloat16."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("no LSTM in bfloat16 on this CPU")
    small = random_target(architectures(V, 6)["llama"])
    drafter = random_drafter(FalconConfig(depth=2), small, 0.1)
    ctx, _ = small.hidden_states(IDS, drafter.needs)
    with torch.autocast("cpu", torch.bfloat16):
        drafter.training_hidden(
            ctx, torch.tensor([[4, 6]]), TrainingMoment(0.0, [3])
        ).sum().backward()
    for name, weight in drafter.named_parameters():
        assert weight.grad is not None and weight.grad.abs().max() > 0, name


def test_blocks_tile_a_text_and_stand_for_all(target: Target) -> None:
    """Of the 7 usable positions (2, 3, 4, 6, 7, 8 and 9) four are even: with probability 4/7 these
    weigh 7/4 each, otherwise the others weigh 7/3 each. Over 2,000 draws, one standard deviation of
    the share is .011."""
    drafter, valid = falcon(target, depth=2), torch.zeros(12, 2, dtype=torch.bool)
    valid[[2, 3, 4, 6, 7, 8, 9], 0] = True
    valid[[2, 3, 6, 7, 8], 1] = True
    generator, seen = torch.Generator().manual_seed(0), Counter[bool]()
    for _ in range(2000):
        weight = drafter.anchors(valid, generator)
        drawn = weight[:, 0].nonzero()[:, 0].tolist()
        even = drawn == [2, 4, 6, 8]
        assert even or drawn == [3, 7, 9]
        share = torch.tensor(7 / 4 if even else 7 / 3)
        torch.testing.assert_close(weight, valid * share * (weight[:, :1] > 0))
        seen[even] += 1
    assert abs(seen[True] / 2000 - 4 / 7) < 0.045
    assert drafter.anchors(valid & False, generator).sum() == 0
    valid[:6] = valid[7:] = False
    assert drafter.anchors(valid, generator).tolist()[6] == [1, 1]


# drafting


@pytest.mark.parametrize(
    ("shape", "passes"),
    [
        (Chain(2), [2]),
        (Chain(5), [2, 2, 2]),
        (Static([[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]), [2, 4]),
    ],
    ids=["block", "chain", "tree"],
)
def test_one_pass_drafts_two_depths(target: Target, shape: Shape, passes: list[int]) -> None:
    """The number of queries in each pass: two for every block that begins there."""
    drafter, queries = falcon(target), list[int]()
    ctx, run = read(target, drafter), drafter.compiled.run
    choose = Choose(Sampler(0.0), "without", RowDraws([0]), None, V)

    def counted(cache: Any, **inputs: Any) -> Any:
        queries.append(inputs["at"].shape[1])
        return run(cache, **inputs)

    drafter.compiled.run = counted
    drafter.draft(ctx, shape, choose, drafter.new_cache())
    assert queries == passes


def test_falcon_trains_on_a_tiny_target(tiny: Tiny, tmp_path: Path) -> None:
    """Trained by the job of `python train.py drafter=falcon experiment=falcon_paper`."""
    given = ["experiment=falcon_paper", "optim.lr=5e-3", "loop.epochs=4"]
    tiny.job(tmp_path / "run", "falcon", *given)
    require_learning(tmp_path / "run", epochs=4)
    assert (tmp_path / "run" / "report" / "results.json").exists()


def test_the_papers_recipe_is_composed() -> None:
    config = compose(["experiment=falcon_paper"])
    assert config.drafter == FalconConfig(depth=4, unroll=2, glance=0.4, noise=0.2)
    used = {name: w for name, w in config.loss.terms.items() if w}
    assert used == pytest.approx({"smooth_l1": 1.0, "kl": 0.1 * 0.9, "ce": 0.1 * 0.1})
    assert (config.loss.depth_decay, config.optim.lr) == (1.0, 3e-5)


@pytest.mark.parametrize("given", ["unroll=5", "glance=1.5", "noise=-1", "depth=0"])
def test_settings_out_of_range_are_told(given: str) -> None:
    with pytest.raises(UserError, match=rf"drafter\.{given.split('=')[0]}"):
        compose(["drafter=falcon", f"drafter.{given}"])

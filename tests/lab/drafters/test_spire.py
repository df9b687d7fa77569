"""SPIRe: an exact target as its own draft, a plain twin of its formulas, and its window.

Run alone: python -m pytest tests/lab/drafters/test_spire.py (about 10 s)
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.context import Context
from specdec.drafters import attention
from specdec.errors import UserError
from specdec.lab.drafters.spire import Spire, SpireConfig, WindowCache
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic
from specdec.targets.target import Target
from tests.drafters.plain import attended as seen
from tests.drafters.plain import key_value, mlp, rms
from tests.runs import require_learning
from tests.tiny import Tiny, architectures, compose, random_drafter, random_target

V, D, Dh, L = 61, 32, 8, 6


def text(length: int) -> Tensor:
    return torch.randint(2, V, (1, length), generator=torch.Generator().manual_seed(length))


def doubled(kind: str = "llama") -> Target:
    target = random_target(architectures(V, L)[kind])
    target.model.double()
    return target


def spire(target: Target, noise: float = 0.1, **config: Any) -> Spire:
    drafter = random_drafter(SpireConfig(**config), target, noise).double()
    drafter.attach(target)
    assert isinstance(drafter, Spire)
    return drafter


def read(target: Target, drafter: Spire, ids: Tensor) -> Context:
    return target.hidden_states(ids, drafter.needs)[0]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_all_layers_of_a_target_over_all_of_the_text_are_the_target(kind: str) -> None:
    """A first layer that adds nothing leaves the embedding to the second, so all the others, over a
    window as long as the text and without feedback, are the whole target."""
    target, depth = doubled(kind), 3
    first = target.layers[0]
    with torch.no_grad():
        first.self_attn.o_proj.weight.zero_()
        first.mlp.down_proj.weight.zero_()
    given: dict[str, Any] = dict(num_layers=L - 1, window=40, feedback=False, draft_vocab=None)
    drafter, ids = spire(target, 0.0, depth=depth, **given), text(16)
    final = target.hidden_states(ids, drafter.needs)[1]
    anchors = torch.tensor([[1, 5, 12]])
    hidden = drafter.hidden(read(target, drafter, ids), anchors, None)
    for k in range(depth):
        expected = target.logits(final[:, anchors[0] + k])
        torch.testing.assert_close(drafter.unembed(hidden[:, :, k], k), expected)
    short = spire(target, 0.0, depth=depth, **given | {"window": 4})
    clipped = short.hidden(read(target, short, ids), anchors, None)
    # anchors 1 and 5 have at most a sink and a window of 4 before them, anchor 12 has more
    torch.testing.assert_close(clipped[:, :2], hidden[:, :2])
    assert not torch.allclose(clipped[:, 2], hidden[:, 2], atol=1e-2)


def test_drafted_tokens_are_read_as_the_paper_says() -> None:
    """One anchor and one drafted token after the other, in loops over single vectors."""
    target, window, sink, depth = doubled(), 3, 2, 3
    drafter = spire(target, depth=depth, window=window, sink=sink, draft_vocab=None)
    assert drafter.memory is not None
    torch.nn.init.normal_(drafter.memory, generator=torch.Generator().manual_seed(3))
    ids, a = text(12), 9
    ctx = read(target, drafter, ids)
    assert ctx.layers_BTF is not None
    streams = ctx.layers_BTF[0].unflatten(-1, (2, D))  # [T, layer, D]
    weights = [
        {n.removeprefix(f"layers.{i}."): x for n, x in drafter.state_dict().items()}
        for i in range(2)
    ]
    visible = [t for t in range(a) if t < sink or t >= a - window]

    def pair(i: int, x: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return key_value(weights[i], rms(x, weights[i]["input_layernorm.weight"]), t, Dh)

    caches = [[pair(i, streams[t, i], t) for t in visible] for i in range(2)]
    for k in range(depth):
        passed = [target.embedding(ids[0, a + k])]
        for i, w in enumerate(weights):
            x = passed[-1]
            inner = rms(x, w["input_layernorm.weight"])
            x = x + seen(w, inner, a + k, [*caches[i], pair(i, x, a + k)])
            passed.append(x + mlp(w, rms(x, w["post_attention_layernorm.weight"])))
        hidden = drafter.hidden(ctx, torch.tensor([[a]]), ids[:, None, a + 1 : a + 1 + k])
        torch.testing.assert_close(
            hidden[0, 0, k], passed[-1], rtol=1e-5, atol=1e-5
        )  # float32 angles
        shares = drafter.memory.softmax(-1)
        for i in range(2):
            memory = sum(shares[i, n] * passed[n] for n in range(3))
            assert isinstance(memory, Tensor)
            caches[i].append(pair(i, memory, a + k))


@torch.no_grad()
@pytest.mark.parametrize("sink", [0, 2])
def test_a_draft_over_a_long_text_keeps_and_reads_a_window(sink: int) -> None:
    """Rows of unequal length, read in steps of unequal length, draft as without a cache, from a
    cache that does not grow."""
    target, window = doubled(), 4
    drafter = spire(target, depth=3, window=window, sink=sink, draft_vocab=None)
    greedy = Choose(Sampler(0.0), "without", RowDraws([0, 1]), None, V)
    rows = torch.cat([text(40), text(41)[:, :40]])
    hidden_states, cache = read(target, drafter, rows), drafter.new_cache()
    wide: list[int] = []
    made = drafter.of_text
    drafter.of_text = lambda x, rope: (wide.append(x.shape[1]), made(x, rope))[1]  # type: ignore
    for ends in ([3, 2], [4, 11], [5, 12], [30, 17], [30, 18], [31, 40]):
        ctx = Context(rows, hidden_states.layers_BTF, lengths=ends)
        for shape in (Chain(3), Dynamic(3, 8, 3)):
            drafted = drafter.draft(ctx, shape, greedy, cache)
            assert max(wide) <= sink + window
            wide.clear()
            alone = drafter.draft(ctx, shape, greedy)
            wide.clear()
            assert torch.equal(drafted.tokens_BG, alone.tokens_BG)
        assert cache.slot_layers[0].keys.shape[2] == sink + window + 1
    cache.select([1])
    ctx = Context(rows[1:], read(target, drafter, rows[1:]).layers_BTF, lengths=[40])
    assert torch.equal(
        drafter.draft(ctx, Chain(3), greedy, cache).tokens_BG,
        drafter.draft(ctx, Chain(3), greedy).tokens_BG,
    )


def test_a_ring_holds_the_sinks_and_the_latest_tokens() -> None:
    """Whatever the steps, the slots seen hold exactly the tokens that training sees."""
    cache, held = WindowCache(1, 2, 3), dict[int, int]()
    for count in (1, 2, 3, 7, 8, 8, 30):
        position, visible = cache.advance([count], torch.device("cpu"))
        assert isinstance(cache.slots, Tensor)
        held |= dict(zip(cache.slots[0].tolist(), position[0].tolist(), strict=True))
        found = {held[slot] for slot in visible[0].nonzero()[:, 0].tolist()}
        assert found == {t for t in range(count) if t < 2 or t >= count - 3}


@pytest.mark.parametrize("computed", [attention._blocks, attention._flex])
def test_every_way_to_attend_sees_the_same_window(computed: Any) -> None:
    """In tiles of 128 keys and by flex attention as with all scores at once, for two documents."""
    generator, A = torch.Generator().manual_seed(0), 300
    query, *drawn = (torch.randn(1, 2, n, A, Dh, generator=generator) for n in (2, 1, 1, 1, 1))
    keys, values, *own = (x[:, :, 0] for x in drawn)
    place = torch.cat([torch.arange(100), torch.arange(200)])[None]
    document, every = torch.arange(A)[None].ge(100).long(), torch.arange(A)[None]
    sight = attention.Sight.of_anchors(every, place, document)._replace(window=7, sink=2)
    pairs = ((own[0], own[1]),)
    found = computed(query, (keys, values), sight, pairs)
    torch.testing.assert_close(found, attention._whole(query, (keys, values), sight, pairs))
    narrow = sight._replace(window=6)
    assert not torch.allclose(found, attention._whole(query, (keys, values), narrow, pairs))


def test_spire_trains_on_a_tiny_target(tiny: Tiny, tmp_path: Path) -> None:
    """Trained by the job of `python train.py experiment=spire_paper`, memories included."""
    tiny.job(tmp_path / "run", "spire", "experiment=spire_paper", "optim.lr=5e-3")
    require_learning(tmp_path / "run")
    config = compose(["experiment=spire_paper"])
    assert config.drafter == SpireConfig(draft_vocab=None)
    assert config.loss.terms["tv"] == config.loss.terms["soft_ce"] == 0.5


def test_settings_that_do_not_fit_are_refused() -> None:
    target = doubled()
    with pytest.raises(UserError, match=r"drafter\.num_layers=6: give at most 5"):
        Spire.plan(SpireConfig(num_layers=6), target)
    with pytest.raises(UserError, match=r"drafter\.window=0"):
        spire(target, window=0)

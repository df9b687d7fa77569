"""Drafts whose layers see a window of the text, and its first tokens.

Run alone: python -m pytest tests/drafters/test_window.py
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.context import Context
from specdec.drafters import attention
from specdec.drafters.attention import Keys, Sight
from specdec.drafters.base import Predictor, vocabulary
from specdec.drafters.dflash import DFlashConfig
from specdec.drafters.dflash2 import DFlash2Config
from specdec.drafters.dspark import DSparkConfig
from specdec.drafters.eagle import EagleConfig
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.jetspec import JetSpecConfig
from specdec.drafters.mtp import MTPConfig
from specdec.drafters.peagle import PEagleConfig
from specdec.errors import UserError
from specdec.runtime.sliding_cache import SlidingCache
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape
from specdec.targets.target import Target
from tests.drafters.families import VOCAB, V, context, make_target, text
from tests.tiny import random_drafter

WIDE = 48  # tokens of a text here
FAMILIES: dict[str, Any] = {
    "eagle": EagleConfig(depth=3, initialisation="random"),
    "eagle3": Eagle3Config(depth=3, draft_vocab=40, num_layers=2),
    "mtp": MTPConfig(depth=3),
    "peagle": PEagleConfig(depth=3, draft_vocab=40),
    "dflash": DFlashConfig(depth=3, num_layers=2, draft_vocab=40),
    "dflash2": DFlash2Config(depth=3, num_layers=2, draft_vocab=40, group=4, rank=4),
    "dspark": DSparkConfig(depth=3, num_layers=2, draft_vocab=40, rank=4),
    "jetspec": JetSpecConfig(depth=3, num_layers=2, draft_vocab=None),
}
LAYERS = {"eagle3": 2}  # above one, what a layer sees depends on what was seen before it


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def made(name: str, target: Target, **settings: Any) -> Any:
    config = replace(FAMILIES[name], **settings)
    return random_drafter(config, target, 0.1 if name == "eagle" else 0.3, VOCAB)


def hidden(drafter: Predictor, ctx: Context, anchors: list[int]) -> Tensor:
    drafted = torch.tensor([[[7, 9]] * len(anchors)])
    return drafter.hidden(ctx, torch.tensor([anchors]), drafted)


def drafts(
    drafter: Predictor, ctx: Context, shape: Shape, cache: Any = None, first: int = 0
) -> tuple[list[list[int]], Tensor | None]:
    """The drafted tokens at T = 1, and their q; None for dynamic trees, which are not drawn.
    `first` is the number of the first row, by which its tokens are drawn."""
    draws = RowDraws(range(first, first + len(ctx.ids_BT)), ctx.ids_BT.device)
    choose = Choose(Sampler(1.0), "without", draws, vocabulary(drafter), V)
    proposal = drafter.draft(ctx, shape, choose, cache)
    return proposal.tokens_BG.tolist(), proposal.q_BGV


@pytest.mark.parametrize("name", FAMILIES)
def test_a_window_as_long_as_the_text_changes_nothing(name: str, target: Target) -> None:
    whole, wide = made(name, target), made(name, target, window=WIDE + 8)
    ctx = context(target, whole, text(0, WIDE))
    assert torch.equal(hidden(whole, ctx, [9, 30, 40]), hidden(wide, ctx, [9, 30, 40]))
    caches = whole.new_cache(), wide.new_cache()
    assert isinstance(caches[1], SlidingCache)
    for end in (20, 23, WIDE):
        ctx = context(target, whole, text(0, WIDE)[:, :end])
        one, other = (drafts(d, ctx, Chain(3), c) for d, c in zip((whole, wide), caches))
        assert one[1] is not None and other[1] is not None
        assert one[0] == other[0] and torch.equal(one[1], other[1])


@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_sees_its_window_and_the_first_tokens(name: str, sink: int, target: Target) -> None:
    """Exactly these: a change of any other state before the anchor changes nothing."""
    anchor, window, layers = 40, 8, LAYERS.get(name, 1)
    drafter = made(name, target, window=window, sink_tokens=sink)
    ctx = context(target, drafter, text(1, WIDE))
    # the reader is the anchor's pair, or slot 0 of a block, which the other slots see
    reader = anchor if hasattr(drafter, "slots") else anchor - 1
    first = reader - layers * (window - 1)
    # row t has another state at token t, which no other token reads; the last row is unchanged
    changed_BT1 = torch.eye(anchor + 1, WIDE, dtype=torch.bool)[..., None]
    changed_BT1[anchor] = False
    layers_BTF, final_BTD = (
        None if x is None else x.expand(anchor + 1, -1, -1).masked_fill(changed_BT1, 3.0)
        for x in (ctx.layers_BTF, ctx.final_BTD)
    )
    many = Context(ctx.ids_BT.expand(anchor + 1, -1), layers_BTF, final_BTD)
    drafted = torch.tensor([[[7, 9]]]).expand(anchor + 1, -1, -1)
    output_BD = drafter.hidden(many, torch.tensor([[anchor]] * (anchor + 1)), drafted)[:, 0, 0]
    seen = [t for t in range(anchor) if (output_BD[t] - output_BD[anchor]).abs().max() > 1e-6]
    assert seen == [*range(sink), *range(first, anchor)]


@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cached_draft_is_that_of_teacher_forcing_across_the_window(
    name: str, sink: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of unequal length, which pass the end of the window at different steps, read in passes
    of a few tokens; chains and trees, also deeper than the window."""
    monkeypatch.setattr(attention, "READ", 3)
    drafter = made(name, target, window=6, sink_tokens=sink)
    ids, cache = torch.cat([text(2, WIDE), text(3, WIDE)]), drafter.new_cache()
    shapes: list[Shape] = [Chain(3), Dynamic(3, 10, 4)]
    if drafter.limits.depth is None:
        shapes.append(Chain(9))
    history = [(4, 9), (5, 12), (9, 14), (9, 14), (26, 15), (27, 44), (29, 45), (48, 46)]
    for n, ends in enumerate(history):
        shape = shapes[n % len(shapes)]
        ctx = context(target, drafter, ids[:, : max(ends)])
        ctx.lengths = list(ends)
        tokens, q_BGV = drafts(drafter, ctx, shape, cache)
        for b, end in enumerate(ends):
            alone = context(target, drafter, ids[b : b + 1, :end])
            plain, q_1GV = drafts(drafter, alone, shape, first=b)
            assert tokens[b] == plain[0], (n, b)
            assert (q_BGV is None) == (q_1GV is None) == isinstance(shape, Dynamic)
            if q_BGV is not None and q_1GV is not None:
                torch.testing.assert_close(q_BGV[b], q_1GV[0], atol=1e-4, rtol=1e-4)


def test_a_cache_holds_a_window_however_long_the_text(target: Target) -> None:
    """Its memory, and the slots that a step reads, are the same after 90 tokens as after 900."""
    for name in ("eagle3", "dflash"):
        drafter = made(name, target, window=16, sink_tokens=2)
        held, shown = list[int](), list[int]()
        generator = torch.Generator().manual_seed(0)
        for length in (90, 900):
            ids, cache = torch.randint(V, (1, length), generator=generator), drafter.new_cache()
            needs = drafter.needs
            width = len(needs.layers) * target.width
            ctx = Context(ids, torch.randn(1, length, width, generator=generator))
            for end in range(length - 4, length + 1, 2):
                part = Context(ids[:, :end], ctx.layers_BTF, lengths=[end])
                drafts(drafter, part, Chain(3), cache)
            held.append(cache.nbytes)
            shown.append(cache.shown)
        assert held[0] == held[1] and shown[0] == shown[1] < 40
        whole = made(name, target).new_cache()
        drafts(made(name, target), Context(ids, ctx.layers_BTF, lengths=[900]), Chain(3), whole)
        assert whole.nbytes > held[1]


@pytest.mark.parametrize("ahead", [0, 2, 9])
def test_every_way_to_attend_sees_the_same_window(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of packed documents, and with tiles left out that no anchor of a block sees."""
    monkeypatch.setattr(attention, "BLOCK", 4)
    generator, N = torch.Generator().manual_seed(0), 40
    draw = [torch.randn(2, 2, N, 8, generator=generator) for _ in range(5)]
    query = torch.randn(2, 2, 3, N, 8, generator=generator)
    place = torch.cat([torch.arange(13), torch.arange(27)]).expand(2, -1)
    document = torch.tensor([0] * 13 + [1] * 27).expand(2, -1)
    every = torch.arange(N).expand(2, -1)
    sight = Sight.of_anchors(every, place, document)
    sight = sight._replace(window=6, sink=2, ahead=ahead)
    own = ((draw[2], draw[3]),) if ahead else ()
    whole = attention._whole(query, (draw[0], draw[1]), sight, own)
    blocks = attention._blocks(query, (draw[0], draw[1]), sight, own)
    torch.testing.assert_close(blocks, whole)
    assert max(len(sight.tiles(slice(n, n + 4))) for n in range(0, N, 4)) <= 5
    mask = sight.mask(slice(0, N), torch.arange(N))
    near = (every[0] > every[0, :, None] + ahead - 6) & (document[0] == document[0, :, None])
    sinks = (place[0] < 2) & (document[0] == document[0, :, None])
    own_NN = torch.eye(N, dtype=torch.bool) & (ahead == 0)
    assert torch.equal(mask[0], ((near | sinks) & (every[0] <= every[0, :, None])) | own_NN)


def test_a_pass_of_a_later_depth_sees_no_more_own_keys_than_the_window() -> None:
    keys = Keys(Sight(*[torch.zeros(1, 1).long()] * 3, torch.zeros(1, 1).long(), window=2))
    ones = torch.ones(1, 1, 1, 4)
    keys.share((ones, ones))
    keys.own[0] = tuple((ones, n * ones) for n in range(5))
    keys.read_ahead(5)
    assert float(keys.heads(0, torch.ones(1, 1, 1, 1, 4)).mean()) == 3.5


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("eagle3", {"sink_tokens": 2}, "drafter.sink_tokens=2: without drafter.window"),
        ("eagle", {"window": 0}, "drafter.window=0"),
        ("dflash", {"window": 3}, "drafter.window=3: a block has 4 tokens"),
        ("mtp", {"window": 8, "modules": 3}, "only a single module can have a window"),
        ("peagle", {"window": 8, "sink_tokens": -1}, "drafter.sink_tokens=-1"),
    ],
)
def test_what_cannot_be_combined_is_said_in_one_line(
    name: str, settings: dict[str, Any], said: str, target: Target
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        made(name, target, **settings)
    assert "\n" not in str(caught.value)

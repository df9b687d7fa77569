"""Attention over anchors, as EAGLE's layers and blocks use it: in parts of a long text as all at
once.

Run alone: python -m pytest tests/drafters/test_recurrent.py
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.context import Context
from specdec.drafters import Drafter, attention
from specdec.drafters.dflash import DFlashConfig
from specdec.drafters.eagle import EagleConfig
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.jetspec import JetSpecConfig
from specdec.errors import UserError
from specdec.runtime.cpu.machine_probes import ProbeResult
from specdec.targets.target import Target
from tests.tiny import architectures, compose, random_drafter, random_target

V = 61
CONFIGS = {
    "eagle": EagleConfig(),
    "eagle3": Eagle3Config(draft_vocab=40),
    "dflash": DFlashConfig(depth=3, num_layers=2, draft_vocab=40),
    "jetspec": JetSpecConfig(depth=2, num_layers=2, draft_vocab=40),
}


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(architectures(V, 6)["llama"])
    target.model.double()
    return target


def drafter_of(name: str, target: Target) -> Drafter:
    drafter = random_drafter(CONFIGS[name], target, 0.1, torch.arange(40)).double()
    drafter.attach(target)
    return drafter


def packed(target: Target, drafter: Drafter) -> tuple[Context, Tensor]:
    """Two rows: three documents and padding in one, one document in the other; anchors that are
    not all in order, and some twice."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(2, V, (2, 40), generator=generator)
    lengths = [9, 17, 8]
    position = [*range(9), *range(17), *range(8), *[0] * 6]
    document = [d for d, n in enumerate(lengths) for _ in range(n)] + [-1] * 6
    position_BT = torch.stack([torch.tensor(position), torch.arange(40)])
    document_BT = torch.stack([torch.tensor(document), torch.zeros(40, dtype=torch.long)])
    read = {"position_BT": position_BT, "document_BT": document_BT}
    ctx, _ = target.hidden_states(ids_BT, drafter.needs, **read)
    first = [*range(1, 9), *range(10, 26), *range(27, 34), 1, 1]
    return ctx, torch.stack(
        [torch.tensor(first), torch.randperm(len(first), generator=generator) + 1]
    )


def gradients(drafter: Drafter, run: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    hidden = run()
    weight = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    found = torch.autograd.grad((hidden * weight).sum(), trained, allow_unused=True)
    return hidden.detach(), [x for x in found if x is not None]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.parametrize("block", [1, 4, 7, 64])
@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_of_anchors_equal_all_at_once(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    block: int,
    dtype: Any,
    tolerance: float,
) -> None:
    """States and the gradients of all weights, for blocks that divide neither anchors nor keys."""
    drafter = drafter_of(name, target).to(dtype)
    ctx, anchors = packed(target, drafter)
    whole, whole_gradients = gradients(drafter, lambda: drafter.hidden(ctx, anchors, None))
    monkeypatch.setattr(attention, "WHOLE", 0)
    monkeypatch.setattr(attention, "BLOCK", block)
    found, found_gradients = gradients(drafter, lambda: drafter.hidden(ctx, anchors, None))
    scale = float(whole.abs().max())
    torch.testing.assert_close(found / scale, whole / scale, atol=tolerance, rtol=0)
    assert len(found_gradients) == len(whole_gradients) > 6
    for ours, theirs in zip(found_gradients, whole_gradients, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours / scale, theirs / scale, atol=tolerance, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", CONFIGS)
def test_flex_attention_sees_what_all_at_once_sees(
    target: Target, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its masks, which a GPU compiles; on a CPU it has no backward pass. Double: 1e-9."""
    drafter = drafter_of(name, target)
    ctx, anchors = packed(target, drafter)
    with torch.no_grad():
        whole = drafter.hidden(ctx, anchors, None)
        monkeypatch.setattr(attention, "WHOLE", 0)
        monkeypatch.setattr(attention, "flexible", lambda *_: ProbeResult(True, ""))
        monkeypatch.setattr(attention, "_blocks", None)
        found = drafter.hidden(ctx, anchors, None)
    torch.testing.assert_close(found, whole, atol=1e-9, rtol=1e-9)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("name", CONFIGS)
def test_a_long_text_needs_no_square_of_its_length(target: Target, name: str) -> None:
    """A text twice as long needs a largest tensor twice as large, not four times."""
    drafter = drafter_of(name, target)

    def largest(T: int) -> int:
        final = torch.randn(1, T, 32, dtype=torch.float64)
        layers = torch.cat([final] * max(1, len(drafter.needs.layers)), -1)
        ctx = Context(torch.zeros(1, T, dtype=torch.long), layers, final)
        anchors = torch.arange(1, T - 3)[None]
        with Largest() as seen:
            drafter.hidden(ctx, anchors, None).sum().backward()
        return seen.elements

    one, two = largest(1536), largest(3072)
    assert attention.WHOLE < 1536**2
    assert two <= 2.1 * one
    assert two < 3072**2  # less than one score for each anchor and key, of one head


@pytest.mark.parametrize("layers", ["[]", "[1,1,1]", "[3,2]"])
def test_layers_are_refused_that_engines_would_read_otherwise(layers: str) -> None:
    with pytest.raises(UserError, match=r"drafter.layers=\[.*rising order"):
        compose([f"drafter.layers={layers}"])


@pytest.mark.parametrize("unroll", ["0", "4"])
def test_eagle_unrolls_no_deeper_than_it_drafts(unroll: str) -> None:
    with pytest.raises(UserError, match=r"drafter\.unroll"):
        compose(["drafter=eagle", f"drafter.unroll={unroll}"])

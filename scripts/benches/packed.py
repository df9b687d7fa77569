"""Compares products by packed weights with the public operator on this machine."""

from collections.abc import Sequence
from typing import Annotated

import torch
from benches.turns import show
from torch import Tensor
from torch.nn import functional as F

from specdec.compat import packed_product
from specdec.errors import require
from specdec.measure.machine import processor_name
from specdec.progress import console
from specdec.runtime.cpu.machine_probes import seconds
from specdec.runtime.cpu.packed_linear import DTYPES, obstacle, packed_copy, packing_pays

SHAPES = ((576, 576), (3072, 576), (576, 1536), (2048, 2048))  # SmolLM2-135M's, and a wider one
COLD = 1 << 25  # bytes of weights read between two uses of one, so that no cache still holds it
COPIES, WORK = 128, 1 << 27  # the most copies of a weight, and multiplications, of one timing


def packed(
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    rows: Annotated[Sequence[int], "of a product"] = (1, 2, 3, 4, 8, 16, 64, 256),
    repeats: int = 15,
) -> None:
    """The speed of products by packed weights relative to the public operator, with cold caches.

    The rule in `specdec/runtime/cpu/packed_linear.py` chooses between them; a star marks the packed
    weight. Extend the rule for a kind of CPU with stars beside figures well below 1, or with
    figures well above 1 without a star. One thread is used, since several threads wait for each
    other while other processes compute.
    """
    require(bool(set(dtypes) <= {str(x)[6:] for x in DTYPES}), f"--dtypes {dtypes}: unknown dtype")
    torch.set_num_threads(1)
    console.print(f"{processor_name()}, torch {torch.__version__}")
    table = list[list[str]]()
    for name in dtypes:
        dtype: torch.dtype = getattr(torch, name)
        if reason := obstacle(dtype):
            console.print(f"{name}: weights are not packed: {reason}")
            continue
        for out, width in SHAPES:
            gains = [f"{_gain(out, width, dtype, n, repeats):.2f}" for n in rows]
            marked = [x + "*" * packing_pays(dtype, n) for x, n in zip(gains, rows, strict=True)]
            table.append([name, f"{out} × {width}", *marked])
    show(["dtype", "weight", *(f"{n} rows" for n in rows)], table)


@torch.inference_mode()
def _gain(out: int, width: int, dtype: torch.dtype, rows: int, repeats: int) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(out, width, generator=generator).to(dtype)
    count = min(COPIES, COLD // weight.nbytes, WORK // (rows * weight.numel()))
    weights = [weight.clone() for _ in range(max(1, count))]
    copies = [packed_copy(weight) for weight in weights]

    def ours() -> list[Tensor]:
        return [packed_product(x, copy, None) for copy in copies]

    def public() -> list[Tensor]:
        return [F.linear(x, weight) for weight in weights]

    own, theirs = seconds([ours, public], repeats)
    return theirs / own

"""Rotary positions of a draft's layers: the parameters that they take from the target, and factors.

A draft has one kind of layer, which attends to the whole text, so it copies the parameters of the
target's full attention. Engines and transformers read some of these differently, and those
are replaced by what both read alike (`alike`): a draft is then the same network everywhere.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

FULL = "full_attention"
THETA = 10000.0


def of_full_attention(rope: Mapping[str, Any] | None, kind: str | None) -> dict[str, Any] | None:
    """A copy of a target's rotary parameters for layers with full attention or, if they are given
    by kind of layer and there is no such kind, for layers of this `kind`. None if the target has
    none for these layers."""
    if not rope:
        return None
    by_kind = {name: x for name, x in rope.items() if isinstance(x, Mapping)}
    if not by_kind or "rope_type" in rope:
        return {name: copy.deepcopy(x) for name, x in rope.items() if name not in by_kind}
    taken = next((k for k in (FULL, kind) if k in by_kind), next(iter(by_kind)))
    return dict(copy.deepcopy(by_kind[taken]))


def alike(rope: Mapping[str, Any], width: int, positions: int) -> dict[str, Any]:
    """Rotary parameters that transformers and vLLM 0.32 read alike, for `width` rotated numbers of
    a head and texts of up to `positions` tokens.

    `dynamic` changes nothing up to that length, and has a fixed base with `alpha`. `longrope` has
    two sets of factors, between which transformers chooses by a text's length and vLLM by the
    longest text that it may be given: a draft has the short set at any length. vLLM divides
    nothing by the `factor` of `proportional`, and needs every number of `yarn` to be given.
    All other keys, such as the sections of images, are left out.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind, theta = "longrope" if kind == "su" else kind, rope.get("rope_theta") or THETA
    whole = rope.get("original_max_position_embeddings") or positions
    same = {"rope_type": kind, "rope_theta": theta}
    if kind == "proportional":
        return same
    if kind == "linear":
        return same | {"factor": float(rope["factor"])}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factors = {name: float(rope[name]) for name in names}
        return same | factors | {"original_max_position_embeddings": whole}
    if kind == "yarn":
        factor = float(rope.get("factor") or positions / whole)
        return same | {
            "factor": factor,
            "original_max_position_embeddings": whole,
            "attention_factor": _yarn_attention(rope, factor),
            "beta_fast": rope.get("beta_fast") or 32,
            "beta_slow": rope.get("beta_slow") or 1,
            "truncate": rope.get("truncate", True),
        }
    if kind == "longrope" and len(rope["short_factor"]) == width // 2:
        factor = rope.get("factor") or positions / whole
        usual = math.sqrt(1 + math.log(factor) / math.log(whole)) if factor > 1 else 1.0
        scale = rope.get("short_mscale") or rope.get("attention_factor") or usual
        short = [float(x) for x in rope["short_factor"]]
        return same | {
            "short_factor": short,
            "long_factor": list(short),
            "original_max_position_embeddings": whole,
            "attention_factor": float(scale),
        }
    if kind == "dynamic" and rope.get("alpha"):
        theta = theta * rope["alpha"] ** (width / (width - 2))
    return {"rope_type": "default", "rope_theta": theta}


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> float:
    """The factor on cos and sin that YaRN infers unless it is given."""

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if (attention := rope.get("attention_factor")) is not None:
        return float(attention)
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    return float(grown(above) / grown(below)) if above and below else float(grown(1.0))


def rotary_width(rope: Mapping[str, Any] | None, head_dim: int) -> int:
    """How many numbers of a head are rotated: an even number, from 2 to `head_dim`."""
    share = (rope or {}).get("partial_rotary_factor")
    share = 1.0 if share is None else float(share)
    return min(head_dim, max(2, int(head_dim * share) // 2 * 2))


def share_of(width: int, head_dim: int) -> float:
    """The `partial_rotary_factor` that a reader, which rounds down, turns into `width`."""
    share = width / head_dim
    return share if int(head_dim * share) == width else math.nextafter(share, 1.0)


class Rope(nn.Module):
    """Rotary factors for `rotated`, from a table that grows as needed. The config's `rotary_dim`
    (None: all) is the number of rotated numbers of a head; of `proportional` parameters, the others
    are rotated by 0."""

    def __init__(self, llama: LlamaConfig) -> None:
        super().__init__()
        config, width = copy.deepcopy(llama), getattr(llama, "rotary_dim", None)
        rope: dict[str, Any] = config.rope_parameters  # type: ignore[assignment]
        if width is not None and rope["rope_type"] == "proportional":
            rope["partial_rotary_factor"] = share_of(width, int(llama.head_dim or 0))
        elif width is not None:
            config.head_dim = width
        self.rotary = LlamaRotaryEmbedding(config)
        self._table: tuple[Tensor, Tensor] | None = None

    def forward(self, position: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin [..., Dr] at positions below `end`; the first half of sin is negated."""
        device, table = position.device, self._table
        if table is None or len(table[0]) < end or table[0].device != device:
            with torch.inference_mode(False), torch.no_grad():  # it may be trained with later
                steps = torch.arange(max(2 * end, 1024), device=device)[None]
                cos, sin = self.rotary(torch.zeros((), device=device), steps)
            first, second = sin[0].chunk(2, -1)
            table = self._table = cos[0], torch.cat([-first, second], -1)
        return table[0][position], table[1][position]


def rotated(x_BHADh: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of heads, given cos and sin [B, A, Dr] from `Rope`, for their first
    Dr numbers; the others are kept. It is Llama's x · cos + cat(-x_2, x_1) · sin, where x_1 and x_2
    are the halves of x; here sin has the sign."""
    width = rope[0].shape[-1]
    if width < x_BHADh.shape[-1]:
        return torch.cat([rotated(x_BHADh[..., :width], rope), x_BHADh[..., width:]], -1)
    cos, sin = (t[:, None].to(x_BHADh.dtype) for t in rope)
    return torch.addcmul(x_BHADh * cos, x_BHADh.roll(width // 2, -1), sin)

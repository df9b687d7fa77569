"""Llama's parts and an LSTM by their formulas, an entry at a time, for plain twins of drafters."""

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

Weights = dict[str, Tensor]
EPS = 1e-6


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotary(x: Tensor, position: int) -> Tensor:
    """The rotary embedding of heads [H, D] at one position."""
    head_dim = x.shape[-1]
    angle = position / 10000 ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    a, b = x[:, : head_dim // 2], x[:, head_dim // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def key_value(w: Weights, read: Tensor, position: int, width: int) -> tuple[Tensor, Tensor]:
    """The key and the value [H, D] of what attention reads at a position, of heads of a width."""
    key, value = (linear(read, w[f"self_attn.{n}_proj.weight"]).view(-1, width) for n in "kv")
    return rotary(key, position), value


def attended(w: Weights, read: Tensor, position: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
    """What attention adds for a query that sees all of the cache."""
    width = cache[0][0].shape[-1]
    query = rotary(linear(read, w["self_attn.q_proj.weight"]).view(-1, width), position)
    groups = len(query) // len(cache[0][0])
    keys, values = (torch.stack(x).repeat_interleave(groups, 1) for x in zip(*cache, strict=True))
    scores = (query * keys).sum(-1) / width**0.5
    out = (scores.softmax(0)[..., None] * values).sum(0).flatten()
    return linear(out, w["self_attn.o_proj.weight"])


def mlp(w: Weights, read: Tensor) -> Tensor:
    gate, up = (linear(read, w[f"mlp.{n}_proj.weight"]) for n in ("gate", "up"))
    return linear(silu(gate) * up, w["mlp.down_proj.weight"])


def lstm(w: Weights, inputs: list[Tensor], layers: int = 2) -> Tensor:
    """The last output of a stacked LSTM (Hochreiter and Schmidhuber 1997; gates i, f, g, o)."""
    for n in range(layers):
        h = c = torch.zeros_like(w[f"lstm.weight_hh_l{n}"][0])
        outputs = []
        for x in inputs:
            gates = w[f"lstm.weight_ih_l{n}"] @ x + w[f"lstm.bias_ih_l{n}"]
            i, f, g, o = (gates + w[f"lstm.weight_hh_l{n}"] @ h + w[f"lstm.bias_hh_l{n}"]).chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        inputs = outputs
    return inputs[-1]

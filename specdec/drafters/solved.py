"""Recurrent drafts whose start can be solved for in closed form (`Trainable.regress`).

At such a start, attention adds nothing or lets a token see only itself. So depths 0 and 1 depend
only on what they read themselves, and are linear in some of the weights.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from specdec.context import Known
from specdec.drafters.layer import away_from_zero
from specdec.drafters.norm import RMSNorm
from specdec.drafters.recurrence import Recurrent
from specdec.drafters.regression import Squares, ridge

STARTS = ("regression", "target", "random")  # values of the setting `start`


class Solved(Recurrent):
    """A family gives `regress`, made from the methods here."""

    def joined(self, embedding: Tensor, feature: Tensor) -> Tensor:
        """What `fc` reads of a pair [..., 2D], in families where it reads both parts."""
        return torch.cat([embedding, feature], -1)

    @property
    def last_norm(self) -> RMSNorm | None:
        """The norm between the stream and the LM head, if the drafter has one."""
        return None

    def before(self, some: Known) -> Tensor:
        """The features [N, F] that depth 0 reads at known anchors."""
        return some.before(some.ctx.features(self.needs)).to(self.dtype)

    def token(self, some: Known, depth: int) -> Tensor:
        """The embedding [N, D] of the text's own token that a depth reads at known anchors."""
        return self.embed(some.tokens(depth))

    def wanted(self, some: Known, depth: int) -> Tensor:
        """What the stream should be [N, D] after a depth at known anchors: the target's final
        state, divided by the weight of the norm that follows."""
        final_ND = some.wanted(depth).to(self.dtype)
        return final_ND / away_from_zero(self.last_norm.weight) if self.last_norm else final_ND

    def scale_last_norm(self, known: Iterable[Known]) -> None:
        """Check that final states divided by the norm's weight have a mean square near 1. If not
        (the target's norm adds a bias, or has not been copied), set the weight to the states' own
        sizes."""
        assert self.last_norm is not None
        weight_D, final_ND = self.last_norm.weight, next(iter(known)).wanted(0).to(self.dtype)
        if not 0.8 < float((final_ND / away_from_zero(weight_D)).square().mean()) < 1.25:
            size_D = final_ND.square().mean(0).sqrt()
            weight_D.copy_(size_D.clamp_min(1e-3 * float(size_D.max())))

    def solve_pairs(self, fc: nn.Linear, known: Callable[[], Iterable[Known]]) -> None:
        """Solve, by least squares, for the `fc` that best predicts the target's next final state
        from the `joined` pairs of two depths: depth 0 reads a token and the target's state before
        it, depth 1 the next token and the output of depth 0."""
        pairs = Squares()
        for some in known():
            read = self.joined(self.token(some, 0), self.before(some))
            pairs.add(read, self.wanted(some, 0))
        fc.weight.copy_(ridge(pairs.xx, pairs.xy).T)
        for some in known():
            state = self.layer.leave(fc(self.joined(self.token(some, 0), self.before(some))))
            pairs.add(self.joined(self.token(some, 1), state), self.wanted(some, 1))
        fc.weight.copy_(ridge(pairs.xx, pairs.xy).T)

    def solve_mlp(self, known: Callable[[], Iterable[Known]]) -> None:
        """Solve, by least squares, for the output weights of the first layer's MLP, so that the MLP
        adds what the rest of the layer lacks at depths 0 and 1. Its other weights stay as they
        are."""
        layer, mlp, rest = self.layer, self.layer.mlp, Squares()
        mlp.down_proj.weight.zero_()
        for some in known():
            feature = self.fuse(self.before(some))
            for depth in (0, 1):
                read, residual = self.enter(self.token(some, depth), feature)
                stream = residual + layer.self_attn.own_output(read)
                normed = layer.post_attention_layernorm(stream)
                inner = mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed)
                rest.add(inner, self.wanted(some, depth) - stream)
                feature = self.onward(layer.leave(stream))
        mlp.down_proj.weight.copy_(ridge(rest.xx, rest.xy).T)

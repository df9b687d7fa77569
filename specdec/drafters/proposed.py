"""Copied tokens as proposals, as logits, and as the growth that beam search asks for."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.context import Context, Proposal
from specdec.drafters.growth import rereading
from specdec.drafters.predictor import Predictor
from specdec.sampling.trees import Growth

TreeNode = tuple[int, int]  # token and parent: the number of an earlier node, or -1, the anchor


def copied_chains(chains: list[list[int]], ctx: Context) -> Proposal:
    """A proposal of the chain of each row, padded to the longest."""
    longest = max(map(len, chains))
    padded = [ids + [-1] * (longest - len(ids)) for ids in chains]
    return Proposal(torch.tensor(padded, dtype=torch.long, device=ctx.ids_BT.device))


def copied_trees(trees: list[list[TreeNode]], device: torch.device) -> Proposal:
    """A proposal of the tree of each row, padded to the largest."""
    most = max(map(len, trees))
    padded = [[*tree, *[(-1, -1)] * (most - len(tree))] for tree in trees]
    padded_BG2 = torch.tensor(padded, dtype=torch.long, device=device).view(len(trees), most, 2)
    tokens_BG, parents_BG = padded_BG2.unbind(-1)
    return Proposal(tokens_BG, None, parents_BG if most else None)


def point_mass(ids: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V] of copied ids [...]: 0 at the id, -inf elsewhere; -inf throughout where an id
    is below 0."""
    logits = torch.full((*ids.shape, vocab_size), -torch.inf, device=ids.device)
    value = torch.zeros(ids.shape, device=ids.device).masked_fill(ids < 0, -torch.inf)
    return logits.scatter(-1, ids.clamp_min(0)[..., None], value[..., None])


def whole(drafter: Predictor, logits: Tensor) -> Tensor:
    """A draft's logits [..., S] over the target's vocabulary, as float32: -inf outside its own."""
    vocab_S, size = drafter.vocab_S, drafter.sizes.target_vocab
    wide = torch.full((*logits.shape[:-1], size), -torch.inf, device=logits.device)
    wide[..., slice(None) if vocab_S is None else vocab_S] = logits.float()
    return wide


def copied_growth(
    ctx: Context, copied: Callable[[Context, Tensor, int], Tensor], vocab_size: int
) -> Growth:
    """The growth of a drafter that copies, whatever was drafted before (see `Drafter.copied`)."""

    def logits(anchor_BW: Tensor, drafted_BWk: Tensor) -> Tensor:
        k = drafted_BWk.shape[2]
        return point_mass(copied(ctx, anchor_BW, k + 1)[..., k], vocab_size)

    return rereading(ctx, logits)

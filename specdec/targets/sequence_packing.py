"""Runs packed rows document by document, which is correct for every architecture. Some models mask
packed documents from each other and others do not, and some count positions, windows or rotary
factors from the beginning of a row."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

LIKE = 0.9  # documents at least this long, relative to the longest of a batch, join that batch


def by_document(
    read: Callable[[Tensor], Tensor],
    ids_BT: Tensor,
    position_BT: Tensor | None,
    document_BT: Tensor | None,
    lines: Sequence[int] = (),
) -> Tensor:
    """The states [B, T, D] of rows that hold documents, packed as for `Target.features`. `read`
    returns the states [N, T, D] of texts [N, T]. States are 0 at padding. `lines`: see
    `document_groups`."""
    if position_BT is None:
        return read(ids_BT)
    slots, states, device = list[Tensor](), list[Tensor](), ids_BT.device
    for slots_NT, mine_NT in document_groups(position_BT, document_BT, lines):
        state_ND = read(ids_BT.flatten()[slots_NT.to(device)]).flatten(0, 1)
        states.append(state_ND[mine_NT.flatten().nonzero()[:, 0].to(device)])
        slots.append(slots_NT[mine_NT])
    of_documents_ND = torch.cat(states)
    whole_ND = of_documents_ND.new_zeros(ids_BT.numel(), of_documents_ND.shape[-1])
    whole_ND = whole_ND.index_copy(0, torch.cat(slots).to(device), of_documents_ND)
    return whole_ND.view(*ids_BT.shape, -1)


def document_groups(
    position_BT: Tensor, document_BT: Tensor | None, lines: Sequence[int] = ()
) -> Iterator[tuple[Tensor, Tensor]]:
    """The documents of packed rows in groups of similar length, longest first. For each group: the
    slots [N, T] of the batch to read, and a mask of those that belong to each document (short ones
    read beyond their end). No group has lengths on both sides of one of the `lines`. Both tensors
    are on the CPU, so a host that launches passes on a GPU waits for it once."""
    if document_BT is None:
        document_BT = torch.zeros_like(position_BT)
    position_BT, document_BT = torch.stack([position_BT, document_BT.to(position_BT)]).cpu()
    real_BT = document_BT >= 0
    begins_BT = (position_BT == 0) & real_BT
    number_BT = begins_BT.flatten().cumsum(0) - 1
    length_N, order_N = torch.bincount(number_BT[real_BT.flatten()]).sort()
    begin_N = begins_BT.flatten().nonzero()[:, 0][order_N]
    lengths = length_N.tolist()
    while lengths:
        longest = lengths[-1]
        least = max([LIKE * longest, *(line + 1 for line in lines if line < longest)])
        group = slice(sum(n < least for n in lengths), len(lengths))
        step_T = torch.arange(longest)
        slots_NT = begin_N[group, None] + step_T
        yield slots_NT.clamp_max(position_BT.numel() - 1), step_T < length_N[group, None]
        del lengths[group]

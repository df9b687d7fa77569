"""Features that the target computed while it answered, so that it need not read its own text again.

The last token of an answer was emitted but never read: its features are stored as 0. Nothing reads
them, since the p of that token stands one position before it and anchors end earlier still.
"""

import numpy as np
from torch.nn.functional import pad

from specdec.context import Context, Needs
from specdec.decoding.answers import Record
from specdec.forcing.teacher import summarise
from specdec.sampling.sampler import Sampler
from specdec.target.base import Target
from train.features.store import Features, Store, name_of


class Decoded:
    """Takes the features of answers as they end, and writes those of a batch as one file."""

    def __init__(self, store: Store, needs: Needs, sampler: Sampler) -> None:
        self.store, self.needs, self.sampler = store, needs, sampler
        self._found: dict[str, Features] = {}

    def record(self, target: Target) -> Record:
        """What `decode` is to keep for the answers of one batch."""

        def keep(text: list[int], ctx: Context) -> None:
            assert ctx.final_BTD is not None
            log_z, threshold, argmax = summarise(target, ctx.final_BTD, self.sampler)
            read = Features(ctx.final_BTD, log_z, threshold, argmax.int(), ctx.layers_BTF)
            lacking = len(text) - ctx.final_BTD.shape[1]  # the last token
            whole = {
                name: pad(x[0], (0, 0) * (x.dim() - 2) + (0, lacking)).cpu()
                for name, x in read.tensors().items()
            }
            self._found[name_of(np.array(text, np.int32))] = Features(**whole)

        return Record(self.needs, keep)

    def write(self) -> None:
        """Store what was kept since the last call."""
        if self._found:
            self.store.add(self._found)
            self._found = {}

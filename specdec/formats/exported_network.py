"""An export as an engine reads it: a drafter that computes what the network of its files computes.

The network is the second implementation of reference_networks.py, built from the files alone. It
reads each anchor's text from the start, so it is slow, and serves only to compare.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from specdec.context import Context, HiddenStateSpec
from specdec.drafters.base import Drafter, Predictor
from specdec.errors import UserError, require
from specdec.formats.check_text import FINAL, CheckText, ExportFolder
from specdec.formats.export_check import network_of_export
from specdec.formats.reference_networks import ReferenceNetwork
from specdec.targets.parts import TargetParts


@dataclass(frozen=True)
class KnownText(CheckText):
    """A text with the target's own states [T, D] by layer (`FINAL`: the final ones), and the tokens
    that were drafted after its only anchor."""

    states: Mapping[int, Tensor] = field(default_factory=dict)
    drafted: tuple[int, ...] = ()

    def state(self, k: int) -> Tensor:
        return self.states[k]

    def following(self, anchor: int) -> Tensor:
        return torch.tensor(self.drafted[: self.depths - 1], dtype=torch.long).to(self.ids_T.device)


@dataclass(frozen=True)
class LayersAsked(CheckText):
    """A text that notes which layers a network reads."""

    asked: list[int] = field(default_factory=list)

    def state(self, k: int) -> Tensor:
        self.asked.append(k)
        return super().state(k)


class ExportedNetwork(Predictor):
    """The files of an export, as a drafter for its target. `like` is a drafter of the same kind.
    Raises UserError for files that no engine would load, and for a layout without a second
    implementation."""

    files: ExportFolder
    network: ReferenceNetwork

    def __init__(self, folder: Path, like: Drafter, target: TargetParts) -> None:
        super().__init__(like.config, replace(like.sizes, draft_vocab=None))
        self.limits = like.limits
        self.files, self.network = network_of_export(folder, target)
        drawn = CheckText.drawn_for(like, target)
        text = LayersAsked(drawn.ids_T, drawn.anchors, drawn.depths, drawn.width)
        try:
            with torch.no_grad():
                self.network(self.files, text, text.anchors[0])
        except (KeyError, IndexError, RuntimeError, TypeError) as error:  # an engine may crash, too
            raise UserError(f"{folder}: an engine cannot run it ({error!r})") from error
        layers = tuple(dict.fromkeys(k for k in text.asked if k != FINAL))
        require(all(0 < k <= target.depth for k in layers), f"{folder} reads the layers {layers}")
        self.needs = HiddenStateSpec(layers, FINAL in text.asked)

    @torch.no_grad()
    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        """The logits [B, A, K, V] themselves."""
        if drafted_BAK is None:
            places = anchors_BA[..., None] + torch.arange(1, self.depth).to(anchors_BA.device)
            last = ctx.ids_BT.shape[1] - 1
            drafted_BAK = (
                ctx.ids_BT[:, None]
                .expand(-1, anchors_BA.shape[1], -1)
                .gather(2, places.clamp_max(last))
            )
        depths, position_BT = drafted_BAK.shape[2] + 1, ctx.documents()[0]
        rows = []
        for b, anchors in enumerate(anchors_BA.tolist()):
            states = self._states(ctx, b)
            for a, drafted in zip(anchors, drafted_BAK[b].tolist(), strict=True):
                start = a - int(position_BT[b, a])  # of the anchor's document
                text = KnownText(
                    ids_T=ctx.ids_BT[b, start : a + 1],
                    anchors=(a - start,),
                    depths=depths,
                    width=self.files.target.width,
                    states={k: state_TD[start:] for k, state_TD in states.items()},
                    drafted=tuple(drafted),
                )
                rows.append(self.network(self.files, text, a - start)[:depths])
        logits_BAKV: Tensor = torch.stack(rows).unflatten(0, anchors_BA.shape)
        return logits_BAKV

    def _states(self, ctx: Context, b: int) -> dict[int, Tensor]:
        states = dict[int, Tensor]()
        if ctx.layers_BTF is not None:
            parts = ctx.layers_BTF[b].float().split(self.files.target.width, -1)
            states.update(zip(self.needs.layers, parts, strict=True))
        if ctx.final_BTD is not None:
            states[FINAL] = ctx.final_BTD[b].float()
        return states

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return hidden

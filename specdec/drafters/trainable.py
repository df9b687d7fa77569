"""Drafters with weights to train."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from specdec.context import Context, FeatureSpec, Known, Moment
from specdec.drafters.predictor import Predictor
from specdec.drafters.proposer import Drafter
from specdec.errors import UserError, require, require_between
from specdec.targets.parts import TargetParts


@dataclass
class AnchorsConfig:
    """Which anchors are trained on: `per_row` of each packed row, drawn anew at every step; null
    takes all. A sample is for families whose training pass costs more with every anchor."""

    per_row: int | None = None

    def __post_init__(self) -> None:
        require_between("drafter.anchors.per_row", self.per_row, 1)

    def draw(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """The weight of each depth at each position [T, K]. Drawn anchors weigh more, so that the
        expected loss and its gradient are those of all valid anchors."""
        weight_TK = valid_TK.float()
        usable = valid_TK[:, 0].nonzero()[:, 0]
        if self.per_row is None or len(usable) <= self.per_row:
            return weight_TK
        order = torch.randperm(len(usable), generator=generator)[: self.per_row]
        drawn_T1 = torch.zeros_like(weight_TK[:, :1])
        drawn_T1[usable[order]] = len(usable) / self.per_row
        return weight_TK * drawn_T1


class Trainable(Predictor):
    """A family with layers writes one `step` through them, which training and drafting both take.
    The step is handed the attention (see `nn.attention`). Training unrolls it in `hidden` at all
    anchors of a text, given the text's own tokens."""

    learning_rates: Mapping[str, float] = {}  # factors of `optim.lr`, by pattern of weight names
    added: str | tuple[str, ...] = ()  # prefixes of tensors that an earlier draft may lack
    regressed: int = 2  # how many depths `regress` solves for
    # It has a head for each depth that reads only states of the target: no drafted token, and
    # nothing of another head (`read_by_heads`, `heads_of`). So training needs the tensors of one
    # head at a time (Gloeckle et al. 2024, arXiv 2404.19737, section 2): its logits are made, give
    # their gradient and are freed before the next head's are made, unless the objective couples the
    # depths.
    separate_heads: ClassVar[bool] = False

    @classmethod
    def trains(cls, config: Any) -> bool:
        return True

    @classmethod
    def build(
        cls,
        config: Any,
        target: TargetParts,
        vocab_S: Tensor | None = None,
        earlier: Drafter | None = None,
    ) -> Self:
        """A drafter to train for a target. Its weights start as the config says, or as those of
        an `earlier` draft (see `inherit`).

        `vocab_S` holds the target ids of a pruned draft vocabulary, ascending (as
        `specdec.drafters.frequent_tokens` gives them); without it, the lowest ids are kept.
        """
        drafter = cls(config, cls.plan(config, target))
        if drafter.vocab_S is not None and vocab_S is not None:
            drafter.vocab_S = vocab_S
        drafter.to(target.device)
        drafter.attach(target)
        with torch.no_grad():
            drafter.start(target)
            if earlier is not None:
                assert isinstance(earlier, Predictor)
                drafter.inherit(earlier)
        return drafter

    def start(self, target: TargetParts) -> None:
        """Set the weights that training starts from."""

    def inherit(self, earlier: Predictor) -> None:
        """Take over the weights of an earlier draft, whose vocabulary must be part of this draft's.
        Rows over the draft vocabulary are matched by token id; rows of tokens that the earlier
        draft lacks keep their start. Raises UserError for a tensor that does not fit."""
        theirs, place_S = earlier.state_dict(), None
        if self.vocab_S is not None and earlier.vocab_S is not None:
            known_S = earlier.vocab_S.to(self.vocab_S.device)
            require(
                bool(torch.isin(known_S, self.vocab_S).all()),
                "the earlier draft has tokens that this one lacks: add them to vocab_S",
            )
            place_S = torch.searchsorted(self.vocab_S, known_S)
        for name, x in self.state_dict().items():
            if name == "vocab_S" or (name not in theirs and name.startswith(self.added)):
                continue
            source = theirs.get(name, torch.empty(0))
            over_vocab = self.vocab_S is not None and x.shape[:1] == self.vocab_S.shape
            if source.shape == x.shape:
                x.copy_(source)
            elif place_S is not None and over_vocab and source.shape == x[place_S].shape:
                x[place_S] = source.to(x)
            else:
                said = f"of shape {list(source.shape)}" if name in theirs else "missing"
                raise UserError(
                    f"the earlier draft's tensor {name!r} is {said}, but {list(x.shape)} is needed"
                    ": give the settings of that draft"
                )

    @property
    def train_depth(self) -> int:
        """How many depths the loss covers: `depth`, or fewer if the family trains on fewer."""
        return self.depth

    def anchors(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        """The weight in the loss of each depth at each position of a row [T, K]; a position
        without weight is not an anchor. By default every valid depth weighs 1. If the config has
        `anchors`, a sample of the anchors is drawn, each of which weighs 1 / its probability, so
        that the expected loss is that of all anchors.

        `valid_TK` marks the depths that predict a token that counts. Both tensors are on the CPU.
        """
        return getattr(self.config, "anchors", AnchorsConfig()).draw(valid_TK, generator)

    def training_hidden(self, ctx: Context, anchors_BA: Tensor, moment: Moment) -> Tensor:
        """The forward pass of training: hidden states [B, A, K, D] at `train_depth` depths or
        more. Families that do not train as they draft (noise on features, glancing, parallel
        depths) replace this default."""
        return self.hidden(ctx, anchors_BA, None)

    @property
    def regresses(self) -> bool:
        """Whether the config asks for an initialisation in closed form, by `regress`."""
        return getattr(self.config, "start", None) == "regression"

    def regress(self, known: Callable[[], Iterable[Known]]) -> None:
        """Initialise the weights in closed form, by least squares over a part of the training
        texts. `known()` yields the same part every time. Called only if the drafter `regresses`."""
        raise NotImplementedError

    def adapted(self, ctx: Context, progress: float) -> tuple[Tensor, float] | None:
        """If the drafter `adapts_target`: the target's final hidden states [B, T, D] with the
        current adapters, and the weight of the draft's own loss when the share `progress` of a run
        is done. The divergence of the adapted target from the original is added with weight 1."""
        return None

    def read_by_heads(self, ctx: Context, anchors_BA: Tensor) -> Tensor:
        """The states [B, A, K, D] that `separate_heads` read at each anchor, or [B, A, 1, D] if all
        heads read the same."""
        raise NotImplementedError

    def heads_of(self, read_NKD: Tensor, first: int) -> Tensor:
        """Hidden states [N, K, D] of K depths, from depth `first` on, made from the states that
        their `separate_heads` read."""
        raise NotImplementedError

    def beyond_training(self, depth: int, tree: bool) -> str:
        """Only drafters that read the target's features lose acceptance beyond their trained depth,
        since there they read their own states in place of these features. A draft that is a
        language model of its own has no such depth."""
        fed_back = self.trains(self.config) and self.needs != FeatureSpec()
        if depth <= self.depth or self.limits.depth is not None or not fed_back:
            return ""
        return (
            f"this {self.config.name} was trained to draft {self.depth} tokens in a row but drafts "
            f"{depth} here: the further ones take as long, and fewer of them will be accepted"
        )


def learning_rate(config: Any) -> float:
    """The learning rate if `optim.lr` is null. Higher ones spoil a start by regression."""
    return 3e-4 if getattr(config, "start", None) == "regression" else 1e-3

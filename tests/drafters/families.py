"""What tests of all drafter families share: a tiny target, and a draft of each family."""

import torch
from torch import Tensor

from specdec.context import Context
from specdec.drafters import Drafter
from specdec.drafters.attention import text_after
from specdec.drafters.base import Predictor
from specdec.drafters.dflash import DFlashConfig
from specdec.drafters.dflash2 import DFlash2Config
from specdec.drafters.dspark import DSparkConfig
from specdec.drafters.eagle import EagleConfig
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.hybrid import HybridConfig
from specdec.drafters.hydra import HydraHeadsConfig
from specdec.drafters.jetspec import JetSpecConfig
from specdec.drafters.lm import LMConfig
from specdec.drafters.medusa import MedusaConfig
from specdec.drafters.mlp import MlpConfig
from specdec.drafters.mtp import MTPConfig
from specdec.drafters.ngram import NgramConfig
from specdec.drafters.peagle import PEagleConfig
from specdec.drafters.pretrained import LoraOptions
from specdec.drafters.suffix import SuffixConfig
from specdec.forcing.teacher import logits_of
from specdec.lab.drafters.copy import CopyConfig
from specdec.lab.drafters.counts import BigramConfig, UnigramConfig
from specdec.lab.drafters.early_exit import EarlyExitConfig
from specdec.lab.drafters.falcon import FalconConfig
from specdec.lab.drafters.lilicorr import LiLiCorrConfig
from specdec.lab.drafters.lookahead import LookaheadConfig
from specdec.lab.drafters.mtp_heads import MTPHeadsConfig
from specdec.lab.drafters.sparse import SparseConfig
from specdec.lab.drafters.spire import SpireConfig
from specdec.sampling.trees import Chain, Dynamic, Shape, Static
from specdec.targets.target import Target
from tests.tiny import (
    architectures,
    learn,
    random_drafter,
    random_target,
)

V, L, T = 61, 6, 14
TARGETS = architectures(V, L)
CONFIGS = {  # seq2seq_lm and translated, which want other targets, have tests of their own
    "eagle3": Eagle3Config(depth=3, draft_vocab=40),
    "eagle3 of two layers": Eagle3Config(
        depth=3, draft_vocab=40, num_layers=2, fc_norm=True, norm_output=True
    ),
    "eagle": EagleConfig(depth=3, initialisation="random"),
    "falcon": FalconConfig(depth=3),
    "mtp": MTPConfig(depth=3),
    "mtp with a module a depth": MTPConfig(depth=3, modules=3),
    "mtp_heads": MTPHeadsConfig(depth=3),
    "medusa": MedusaConfig(depth=3, draft_vocab=40, num_layers=2),
    "hydra": HydraHeadsConfig(depth=3, draft_vocab=40, num_layers=2),
    "hydra with a prefix": HydraHeadsConfig(
        depth=3, draft_vocab=40, prefix=True, shared_head=False
    ),
    "mlp": MlpConfig(depth=3, draft_vocab=40, inner_dim=24),
    "peagle": PEagleConfig(depth=3, draft_vocab=40),
    "dflash": DFlashConfig(depth=3, num_layers=2, draft_vocab=40),
    "dflash2": DFlash2Config(depth=3, num_layers=2, draft_vocab=40, group=4, rank=4),
    "dspark": DSparkConfig(depth=3, num_layers=2, draft_vocab=40, rank=4),
    "jetspec": JetSpecConfig(depth=3, num_layers=2, draft_vocab=None),
    "lilicorr": LiLiCorrConfig(
        depth=3, num_layers=2, draft_vocab=40, candidates=40, correction_width=8, rank=4
    ),
    "eagle3 with a window": Eagle3Config(
        depth=3, draft_vocab=40, num_layers=2, window=4, sink_tokens=1
    ),
    "dflash with a window": DFlashConfig(
        depth=3, num_layers=2, draft_vocab=40, window=5, sink_tokens=1
    ),
    "spire": SpireConfig(depth=3, draft_vocab=40, window=4),
    "spire without feedback": SpireConfig(depth=3, draft_vocab=40, window=30, feedback=False),
    "lm": LMConfig(depth=3, layers=[0, 3]),
    "lm with adapters": LMConfig(depth=3, layers=[0, 3], lora=LoraOptions(rank=2)),
    "ngram": NgramConfig(depth=3),
    "unigram": UnigramConfig(depth=3),
    "bigram": BigramConfig(depth=3),
    "suffix": SuffixConfig(depth=3),
    "lookahead": LookaheadConfig(depth=3, window=5, ngram=3),
    "copy": CopyConfig(depth=3, patience=0),
    "early_exit": EarlyExitConfig(depth=3, layers=2),
    "early_exit with adapters": EarlyExitConfig(depth=3, layers=2, lora=LoraOptions(rank=2)),
    "sparse": SparseConfig(depth=3, budget=3, window=2, refresh=3, sink=1, pool=3),
    "hybrid": HybridConfig(depth=3, head="bigram", copying="ngram"),
    "hybrid with a head": HybridConfig(depth=3, head="eagle3", copying="suffix"),
}
SHAPES: list[Shape] = [
    Chain(3),
    Static([[0], [1], [2], [0, 0], [1, 0], [0, 1], [0, 0, 0]]),
    Static([[0], [1], [0, 0], [1, 0], [1, 0, 0]]),  # two grow at once, then one as in a chain
    Static([[0], [0, 0], [0, 1], [0, 0, 0], [0, 1, 0]]),  # one as in a chain, then two
    Dynamic(3, 10, 4),
]
VOCAB = torch.arange(0, V)[torch.arange(V) % 3 != 1][:40]


def make_target(kind: str = "llama") -> Target:
    return random_target(TARGETS[kind])


def make_drafter(name: str, target: Target, noise: float = 0.3) -> Drafter:
    if name == "eagle":  # no norm bounds its states: more noise gives logits in the thousands
        noise = min(noise, 0.1)
    config, head = CONFIGS[name], None
    if isinstance(config, HybridConfig) and config.head in ("eagle3",):
        head = make_drafter(config.head, target, noise)
    drafter = random_drafter(config, target, noise, VOCAB, earlier=head)
    learn(drafter, [text(seed)[0].tolist() for seed in range(4)])
    return drafter


def context(target: Target, drafter: Drafter, ids: torch.Tensor) -> Context:
    return target.hidden_states(ids, drafter.needs)[0]


def text(seed: int, length: int = T, vocab: int = V) -> torch.Tensor:
    """Random ids in which n-grams repeat, so that prompt lookup has something to copy."""
    half = torch.randint(2, vocab, (1, length // 2), generator=torch.Generator().manual_seed(seed))
    return torch.cat([half, half], 1)


def logits_at(
    drafter: Drafter, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None
) -> Tensor:
    """The logits [B, A, K, S] at anchors, after the text's own tokens or those drafted there, with
    -inf (nothing drafted) as a number that compares equal. Copied tokens depend on no draft."""
    if not drafter.copies:
        assert isinstance(drafter, Predictor)
        return logits(drafter, drafter.hidden(ctx, anchors_BA, drafted_BAK))
    k = drafter.depth - 1 if drafted_BAK is None else drafted_BAK.shape[-1]
    ids_BAK = drafter.copied(ctx, anchors_BA, k + 1)
    if drafted_BAK is None:
        drafted_BAK = text_after(ctx.ids_BT, anchors_BA, k)
    hidden_BAKD = torch.zeros(*ids_BAK.shape, 0)
    if drafter.copying_head is not None:
        head, depth = drafter.copying_head[0], min(k + 1, drafter.copying_head[1])
        assert isinstance(head, Predictor)
        states = head.hidden(ctx, anchors_BA, drafted_BAK[..., : depth - 1])
        hidden_BAKD = torch.nn.functional.pad(states, (0, 0, 0, k + 1 - depth))
    both = (x.flatten(0, 1) for x in (hidden_BAKD, ids_BAK))
    found = logits_of(drafter, *both).unflatten(0, anchors_BA.shape)
    return found.nan_to_num(neginf=-1e9)


def logits(drafter: Predictor, hidden: torch.Tensor) -> torch.Tensor:
    """[B, A, K, S], with -inf (nothing drafted) as a number that compares equal."""
    by_depth = [drafter.unembed(hidden[:, :, k], k) for k in range(hidden.shape[2])]
    return torch.stack(by_depth, 2).nan_to_num(neginf=-1e9)

"""Drafts that run transformers' models read packed documents as if each were alone.

Run alone: python -m pytest tests/drafters/test_packed_documents.py
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.context import Context
from specdec.drafters import DRAFTERS
from specdec.drafters.lm import LMConfig
from specdec.drafters.medusa import MedusaConfig, TargetLoraOptions
from specdec.drafters.pretrained import LoraOptions
from specdec.lab.drafters.early_exit import EarlyExitConfig
from specdec.targets.target import Target
from tests.tiny import REPOSITORY, random_drafter

# these make no mask of packed documents from position ids; Llama 4 also scales its queries by the
# place in a row
KINDS = ("opt", "biogpt", "xglm", "gpt_oss", "afmoe", "bert", "qwen2_vl", "llama4_text", "roberta")
LENGTHS = (7, 12, 5)  # of the documents of a row, before one token of padding


def target_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    from benches import tiny

    config = tiny.config_of(next(arch for arch in tiny.architectures() if arch.name == kind))
    text = config.get_text_config(decoder=True)
    if kind == "llama4_text":
        text.floor_scale, text.attn_scale = 4, 1.0
    torch.manual_seed(0)
    model = Target.auto_class(config).from_config(config, attn_implementation="eager").float()
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    return Target(model, None, kind)


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of ids, positions and documents [2, T]."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 60, (2, sum(LENGTHS) + 1), generator=draw)
    position = torch.cat([torch.arange(n) for n in (*LENGTHS, 1)]).expand(2, -1)
    document = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor([*LENGTHS, 1]))
    return ids, position, document.expand(2, -1)


def require_apart(read: Any, alone: Any) -> None:
    """The states of packed documents are those of `alone`, by a model without our code."""
    ids, position, document = packed()
    with torch.no_grad():
        states = read(ids, position, document)
        for b in range(2):
            for n in range(3):
                of_document = document[b] == n
                theirs = alone(ids[b, of_document][None])[0]
                torch.testing.assert_close(states[b, of_document], theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_of_the_targets_own_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(kind, monkeypatch)
    config = EarlyExitConfig(depth=2, layers=2, lora=LoraOptions(rank=2))
    drafter: Any = random_drafter(config, target, 0.1)

    def alone(ids: Tensor) -> Tensor:
        """In one pass over a cache, in which the model is told each token's position."""
        return drafter.continued(drafter.new_cache(), ids, None)

    require_apart(drafter.over_text, alone)


@pytest.mark.parametrize("kind", ["opt", "biogpt", "xglm", "afmoe", "llama4_text"])
def test_a_draft_lm(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(kind, monkeypatch)
    drafter: Any = DRAFTERS["lm"].build(LMConfig(layers=[0, 1]), target).eval()

    def alone(ids: Tensor) -> Tensor:
        position = torch.arange(ids.shape[1])[None]
        return drafter.step(ids, position_ids=position, use_cache=False)

    require_apart(drafter.over_text, alone)


def test_an_adapted_target_of_medusa(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("opt", monkeypatch)
    config = MedusaConfig(depth=2, adapter=TargetLoraOptions(rank=2))
    drafter: Any = random_drafter(config, target, 0.1)
    _, adapted = drafter.with_adapters_merged(target)

    def read(*of_text: Tensor) -> Tensor:
        ids, position, document = of_text
        ctx = Context(ids, None, None, document, position)
        return drafter.adapted(ctx, 1.0)[0]

    def alone(ids: Tensor) -> Tensor:
        return adapted.body(input_ids=ids, use_cache=False).last_hidden_state

    require_apart(read, alone)


def test_gradients_stay_within_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of one document moves the embeddings of its own tokens alone."""
    target = target_of("opt", monkeypatch)
    config = LMConfig(layers=[0, 1], train_embeddings=True)
    drafter: Any = DRAFTERS["lm"].build(config, target)
    ids, position, document = packed()
    drafter.over_text(ids, position, document)[document == 1].sum().backward()
    table = drafter.model.get_input_embeddings().weight.grad
    moved = set(table.abs().sum(-1).nonzero()[:, 0].tolist())
    assert moved == set(ids[document == 1].tolist())

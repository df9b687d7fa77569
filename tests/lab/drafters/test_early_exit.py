"""Adapters on the target's first layers: on for q, off for p.

Run alone: pytest tests/lab/drafters/test_early_exit.py
"""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.context import Context
from specdec.decoding.decode import decode, generate
from specdec.decoding.way import Way
from specdec.drafters.pretrained import LoraOptions
from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing
from specdec.formats import draft_checkpoint, draft_export
from specdec.lab.drafters.early_exit import EarlyExit, EarlyExitConfig
from specdec.runtime.cpu.packed_linear import PackedLinear
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets.target import Target
from tests.runs import as_before, require_learning_that_resumes
from tests.tiny import Tiny, architectures, batch_of, losses, random_drafter, random_target

RANK, EXIT = 4, 2
TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]
MASKS = [[False] * 3 + [True] * 7] * 2


@pytest.fixture
def target() -> Target:
    return random_target(architectures(61, 4)["llama"])


def config(**lora: object) -> EarlyExitConfig:
    options = LoraOptions(**{"rank": RANK, **lora})  # type: ignore[arg-type]
    return EarlyExitConfig(depth=2, layers=EXIT, lora=options)


def made(target: Target, noise: float = 0.1, **lora: object) -> EarlyExit:
    """A drafter with noise on its adapters: they start at zero, which would hide mistakes."""
    drafter = random_drafter(config(**lora), target, noise)
    assert isinstance(drafter, EarlyExit)
    return drafter


@torch.no_grad()
def logits(drafter: EarlyExit) -> Tensor:
    hidden = drafter.hidden(Context(torch.tensor(TEXTS)), torch.tensor([[3, 7]] * 2), None)
    return drafter.unembed(hidden, 0)


def trained(drafter: EarlyExit, target: Target, steps: int, lr: float = 1e-2) -> list[float]:
    """Sampled α at depth 0 on the texts themselves, before each step of training."""
    forcing, alpha = TeacherForcing(drafter, target, Sampler(1.0)), []
    batch = batch_of(target, drafter.needs, Sampler(1.0), TEXTS, MASKS)
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr)
    for _ in range(steps):
        loss, statistics = forcing(batch)
        alpha.append(float(statistics[0, 2] / statistics[0, 0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return alpha


def test_training_raises_alpha_and_leaves_p_alone(target: Target) -> None:
    def p() -> Tensor:
        return target.logits(target.hidden_states(torch.tensor(TEXTS), drafter.needs)[1])

    plain = EarlyExit.build(EarlyExitConfig(depth=2, layers=EXIT), target)
    names, before = [n for n, _ in target.model.named_modules()], target.model(torch.tensor(TEXTS))
    checksum = target.checksum()
    drafter = EarlyExit.build(config(), target).float()
    assert torch.equal(logits(drafter), logits(plain)), "an adapter starts at nothing"
    assert torch.equal(p(), before.logits)
    alpha = trained(drafter, target, 10)
    assert alpha[-1] > alpha[0]  # on the texts that it is trained on
    assert not torch.equal(logits(drafter), logits(plain))
    assert torch.equal(p(), before.logits)
    assert torch.equal(target.model(torch.tensor(TEXTS)).logits, before.logits)
    assert target.checksum() == checksum
    assert [n for n, _ in target.model.named_modules()] == names
    assert torch.equal(logits(EarlyExit.build(plain.config, target)), logits(plain))


def test_gradients_reach_the_adapters_alone(target: Target) -> None:
    """A layer of width 32, 4 heads of 8, 2 KV heads and an MLP of 48: an adapter of rank r on a
    matrix m × n has r (m + n) weights, and so has the file."""
    drafter = made(target)
    sides = [32 + 32, 32 + 16, 32 + 16, 32 + 32, 32 + 48, 32 + 48, 48 + 32]  # q k v o gate up down
    count = sum(p.numel() for p in drafter.parameters())
    assert (
        count == EXIT * RANK * sum(sides) == sum(x.numel() for x in drafter.state_dict().values())
    )
    trained(drafter, target, 1)
    assert all(p.grad is not None and p.grad.any() for p in drafter.parameters())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("alpha, scale", [(None, 2.0), (2.0, 0.5)])
def test_the_draft_is_the_first_layers_with_the_products_added(
    target: Target, alpha: float | None, scale: float
) -> None:
    """Compared with a copy of the target with W + (alpha / rank) B A, whose state after E layers
    goes through the final norm and the head."""
    drafter, twin = made(target, alpha=alpha), deepcopy(target.model)
    with torch.no_grad():
        for (name, _, _), (down, up) in zip(
            drafter.sizes.adapted, drafter.adapters.pairs, strict=True
        ):
            twin.model.get_submodule(name).weight += scale * up.weight @ down.weight
        states = twin(torch.tensor(TEXTS), output_hidden_states=True).hidden_states[EXIT]
        expected = twin.lm_head(twin.model.norm(states))
    found = logits(drafter)
    for k in range(2):
        torch.testing.assert_close(found[:, :, k], expected[:, [3 + k, 7 + k]])


def test_a_draft_on_disk_holds_the_adapters_alone(target: Target, tmp_path: Path) -> None:
    drafter = made(target)
    draft_checkpoint.write_draft(tmp_path / "best", drafter, target)
    saved = load_file(tmp_path / "best" / draft_checkpoint.WEIGHTS)
    assert len(saved) == 2 * 7 * EXIT and all(n.startswith("adapters.pairs.") for n in saved)
    loaded = draft_checkpoint.load_draft(tmp_path / "best", target, torch.float32)
    assert isinstance(loaded, EarlyExit) and loaded.config == drafter.config
    assert torch.equal(logits(loaded), logits(drafter))
    with pytest.raises(UserError, match="'early_exit' cannot be exported: no engine loads it"):
        draft_export.write_export(tmp_path / "out", loaded, target)
    assert not (tmp_path / "out").exists()

    card = as_before(tmp_path / "best" / draft_checkpoint.CARD)
    card["shape"]["adapted"][0][0] = "layers.7.self_attn.q_proj"
    (tmp_path / "best" / draft_checkpoint.CARD).write_text(json.dumps(card))
    with pytest.raises(UserError, match="adapters do not fit the layers of tiny-llama"):
        draft_checkpoint.load_draft(tmp_path / "best", target)


def test_it_decodes_as_the_target_with_a_cache_of_its_own(target: Target) -> None:
    drafter = made(target, noise=0.02)
    cache = drafter.new_cache()
    assert cache is not None
    assert EarlyExit.build(EarlyExitConfig(layers=EXIT), target).new_cache() is None
    plain = [generate(target, ids, max_new_tokens=30).ids for ids in TEXTS]
    fast = decode(target, TEXTS, Way(drafter, Chain(3)), max_new_tokens=30)
    assert [g.ids for g in fast] == plain
    ctx = Context(torch.tensor(TEXTS), lengths=[9, 5])
    drafter.draft_growth(ctx, cache)
    assert cache.lengths == [9, 5], "the anchor is read with the tokens before it"
    assert [layer.is_initialized for layer in cache.slot_layers] == [True, True, False, False]


def test_packed_layers_are_not_packed_twice(target: Target) -> None:
    body = target.model.model
    body.layers[0].self_attn.q_proj = PackedLinear(body.layers[0].self_attn.q_proj)
    drafter = made(target)
    layer = drafter.body.held.layers[0].self_attn.q_proj
    assert layer.base_layer is body.layers[0].self_attn.q_proj


@pytest.mark.parametrize(
    "lora, words",
    [
        ({"rank": -1}, "drafter.lora.rank=-1"),
        ({"targets": ["nowhere"]}, "drafter.lora: Target modules .*nowhere"),
    ],
)
def test_options_that_cannot_be(target: Target, lora: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        EarlyExit.build(config(**lora), target)


def test_a_run_learns_and_is_resumed(tiny: Tiny, tmp_path: Path, one_thread: None) -> None:
    """The run has dropout and hidden states on disk, and is interrupted after the checkpoint of
    step 4. Then its best draft is trained further."""
    options = ["drafter.lora.rank=4", "drafter.lora.dropout=0.1", "loop.epochs=4"]
    require_learning_that_resumes(tiny, tmp_path, "early_exit", *options)

    options.append(f"drafter.from={tmp_path / 'whole' / 'best'}")
    tiny.job(tmp_path / "further", "early_exit", *options)
    first, further = (losses(tmp_path / name)[0][1]["loss"][0] for name in ("whole", "further"))
    assert further < first  # of the same rows

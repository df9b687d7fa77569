"""Blockwise parallel decoding: parallel heads, decoded greedily, are the paper's algorithm.

Run alone: python -m pytest tests/decoding/test_blockwise.py (under 10 s)
"""

import pytest
import torch

from specdec.decoding.decode import generate
from specdec.decoding.way import Way
from specdec.drafters.medusa import Medusa, MedusaConfig
from specdec.forcing.teacher import TeacherForcing
from specdec.losses.loss_config import LossConfig
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets.target import Target
from tests.drafters.families import make_target, text
from tests.tiny import batch_of, compose, random_drafter

K, NEW = 4, 40  # p_1 is the target's head, p_2 to p_4 are the drafter's


def blockwise(
    target: Target, drafter: Medusa, prompt: list[int], blocks: int
) -> tuple[list[int], list[int], int]:
    """Sections 3 and 4 of Stern et al. (2018): the tokens after the prompt, the size of every
    accepted block, and how often the model was invoked."""
    invocations = 0

    def likeliest(ids: list[int]) -> list[list[int]]:
        """For every position j, the likeliest y_{j+i} under p_i(· | y_{≤j}), i = 1 … k."""
        nonlocal invocations
        invocations += 1
        _, states = target.hidden_states(torch.tensor([ids]), drafter.needs)
        logits = [target.logits(states[0])]
        logits += [drafter.unembed(drafter.output(states[0], i), i) for i in range(K - 1)]
        return torch.stack([x.argmax(-1) for x in logits], 1).tolist()

    ids, sizes = list(prompt), list[int]()
    best = likeliest(ids)
    for _ in range(blocks):
        start = len(ids)
        proposed = ids + best[start - 1]  # predict
        best = likeliest(proposed)  # verify, and predict for wherever the block ends
        size = 1
        while size < K and proposed[start + size] == best[start + size - 1][0]:
            size += 1
        ids = proposed[: start + size]  # accept
        sizes.append(size)
    return ids[len(prompt) :], sizes, invocations


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="module")
def drafter(target: Target) -> Medusa:
    """Heads that have learned the target's greedy responses by the recipe's loss, so that some
    blocks are accepted whole."""
    config = MedusaConfig(depth=K - 1, bias=True, draft_vocab=None)
    drafter = random_drafter(config, target, 0.05)
    assert isinstance(drafter, Medusa)
    texts = [p + generate(target, p, max_new_tokens=NEW).ids for p in prompts()]
    batch = batch_of(target, drafter.needs, Sampler(1.0), texts, [[True] * len(x) for x in texts])
    loss_config = LossConfig({"ce": 1 / (K - 1)}, depth_decay=1.0)
    forcing = TeacherForcing(drafter, target, Sampler(1.0), loss_config)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        (forcing(batch)[0] / sum(map(len, texts))).backward()
        optimizer.step()
    return drafter


def prompts() -> list[list[int]]:
    return [text(seed, 12)[0].tolist() for seed in range(3)]


@pytest.mark.parametrize("n", range(3))
def test_a_step_is_one_invocation_of_the_merged_scheme(
    target: Target, drafter: Medusa, n: int
) -> None:
    """The tokens, blocks and passes of the target are the same: one pass for the prompt and one per
    block. A speculation step commits the drafts that it accepts and then the target's own token; a
    block of the paper is the own token of the last step and the drafts accepted in this one."""
    prompt, passes = prompts()[n], list[int]()
    hook = target.layers[0].register_forward_hook(lambda *_: passes.append(1))
    found = generate(target, prompt, Way(drafter, Chain(K - 1)), max_new_tokens=NEW)
    ours = len(passes)
    hook.remove()
    ids, sizes, invocations = blockwise(target, drafter, prompt, len(found.steps))
    assert sizes == [1 + r.accepted for r in found.steps]
    assert ours == invocations == 1 + len(found.steps) < NEW
    assert (found.ids + found.overrun)[:-1] == ids  # the last is the first of the next block
    assert min(sizes) < max(sizes)


def test_the_papers_recipe_is_composed() -> None:
    """Cross-entropy averaged over seven heads, of a block of eight."""
    config = compose(["experiment=blockwise_paper"])
    heads = MedusaConfig(depth=7, bias=True, shared_head=True, draft_vocab=None)
    assert config.drafter == heads
    assert config.loss.terms == {"ce": pytest.approx(1 / heads.depth, abs=1e-6)}
    assert config.loss.depth_decay == 1.0
    assert config.decode.temperatures == [0.0]

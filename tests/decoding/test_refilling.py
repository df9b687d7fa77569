"""Prompts that take the rows of responses which have ended: nothing of the earlier text is left.

Run alone: python -m pytest tests/decoding/test_refilling.py (under 10 s)
"""

from typing import Any

import pytest
import torch

from specdec.context import Context, HiddenStateSpec
from specdec.decoding.decode import decode, generate
from specdec.decoding.generation import Record
from specdec.decoding.way import Way
from specdec.errors import UserError
from specdec.sampling.sampler import Sampler
from specdec.targets.target import Target
from tests.drafters.families import V, make_drafter, make_target, text
from tests.targets import test_recurrent_states
from tests.targets.test_architectures import OWN, SPARSE
from tests.targets.test_architectures import target_of as with_index
from tests.tiny import architectures, random_target

# unequal prompts, long ones last, so that the cache grows while rows are given away
PROMPTS = [text(i, 3 + (7 * i) % 23)[0].tolist() for i in range(12)]
PROMPTS += [text(40, 70)[0].tolist(), text(41, 2)[0].tolist(), PROMPTS[3]]
SEEDS = [1000 + 7 * i for i in range(len(PROMPTS))]
KINDS = ["llama", "mistral", "qwen3_5_text", "lfm2", "mamba"]
KINDS += ["deepseek_v32"]  # chooses its keys by an index that is kept in slots too
KINDS += ["bloom", "rwkv"]  # rows of one length together; whole texts
EOS = tuple(range(3, 12))  # of a vocabulary of about 50: responses end at different times


def target_of_kind(kind: str) -> Target:
    tiny = architectures(V, 2)
    if kind in tiny:
        return random_target(tiny[kind])
    if kind in test_recurrent_states.KINDS:
        return test_recurrent_states.target_of(kind)
    return with_index(kind, **(OWN[kind][1] if kind in OWN else SPARSE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_responses_are_those_of_one_prompt_at_a_time(kind: str, temperature: float) -> None:
    target, way = target_of_kind(kind), Way(sampler=Sampler(temperature))
    apart = [
        generate(target, prompt, way, seed=seed, max_new_tokens=16, eos=EOS).ids
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    assert len({len(ids) for ids in apart}) > 3, "all responses end at about the same time"
    for rows in (3, 8):
        made = decode(target, PROMPTS, way, max_new_tokens=16, eos=EOS, seeds=SEEDS, at_once=rows)
        assert [g.prompt for g in made] == PROMPTS
        assert [g.ids for g in made] == apart, rows


def test_fewer_passes_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 rows at once: as many passes as the longest of the rows' queues, not the sum of the longest
    responses of each batch; and the batch is never larger."""
    target, sizes = make_target(), list[int]()
    step = target.step

    def counted(ids_BT: Any, *args: Any) -> Any:
        sizes.append(len(ids_BT))
        return step(ids_BT, *args)

    monkeypatch.setattr(target, "step", counted)
    options: dict[str, Any] = {"max_new_tokens": 40, "eos": EOS}
    sampled = Way(sampler=Sampler(1.0))
    prompts, seeds = PROMPTS * 2, [*range(2 * len(PROMPTS))]
    for start in range(0, len(prompts), 8):
        batch = slice(start, start + 8)
        decode(target, prompts[batch], sampled, seeds=seeds[batch], **options)
    before = len(sizes)
    sizes.clear()
    decode(target, prompts, sampled, seeds=seeds, at_once=8, **options)
    assert max(sizes) == 8 and len(sizes) < 0.8 * before


def test_hidden_states_are_those_of_the_text() -> None:
    target, kept = make_target(), dict[tuple[int, ...], Context]()
    needs = HiddenStateSpec((1, 2))
    record = Record(needs, lambda ids, ctx: kept.update({tuple(ids): ctx}))
    made = decode(target, PROMPTS[:-1], max_new_tokens=12, eos=EOS, record=record, at_once=3)
    for g in made:
        ids = [*g.prompt, *g.ids]
        ctx, final_1TD = target.hidden_states(torch.tensor([ids]), needs)
        ours = kept[tuple(ids)]
        assert ours.final_BTD is not None and ours.layers_BTF is not None
        assert ctx.layers_BTF is not None
        torch.testing.assert_close(ours.final_BTD, final_1TD[:, :-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.layers_BTF, ctx.layers_BTF[:, :-1], rtol=1e-4, atol=1e-4)


def test_a_response_of_one_token_makes_room_too() -> None:
    """Every first token ends its response, so that no pass after prefill is needed."""
    target = make_target()
    made = decode(target, PROMPTS, max_new_tokens=1, at_once=2)
    assert [len(g.ids) for g in made] == [1] * len(PROMPTS)
    everything = tuple(range(V))
    made = decode(target, PROMPTS, max_new_tokens=9, eos=everything, at_once=4)
    assert [len(g.ids) for g in made] == [1] * len(PROMPTS)


def test_rows_are_not_refilled_with_a_draft() -> None:
    target = make_target()
    way = Way(make_drafter("eagle3", target))
    with pytest.raises(UserError, match="at_once=2"):
        decode(target, PROMPTS, way, max_new_tokens=4, at_once=2)
    with pytest.raises(UserError, match="at_once=0"):
        decode(target, PROMPTS, max_new_tokens=4, at_once=0)

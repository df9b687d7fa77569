"""Beam search is transformers' beam search, whatever is drafted.

Run alone: python -m pytest tests/lab/decoding/test_beam.py
"""

import functools
import math
from typing import Any

import pytest
import torch

from specdec.context import HiddenStateSpec
from specdec.decoding.decode import generate
from specdec.drafters import Drafter
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.lm import LMConfig
from specdec.drafters.medusa import MedusaConfig
from specdec.drafters.ngram import NgramConfig
from specdec.errors import UserError
from specdec.lab.decoding import beam
from specdec.lab.decoding.beam import BeamResult, beam_search
from specdec.targets.target import Target
from tests.tiny import architectures, random_drafter, random_target

V, L = 41, 3
TARGETS = architectures(V, L, positions=128, window=6)
DRAFTS = {
    "eagle3": Eagle3Config(depth=3, draft_vocab=30, layers=[1, 2, 3]),
    "medusa": MedusaConfig(depth=3, draft_vocab=30),
    "lm": LMConfig(depth=3, layers=[0, 2]),
    "ngram": NgramConfig(depth=3),
}
VOCAB = torch.arange(V)[torch.arange(V) % 4 != 1][:30]
EOS = (3, 7)
PROMPT = [5, 9, 30, 12, 5, 9, 22, 17, 5, 9]


@functools.cache
def make_target(kind: str = "llama") -> Target:
    return random_target(TARGETS[kind])


def make_drafter(name: str, target: Target) -> Drafter:
    return random_drafter(DRAFTS[name], target, 0.05, VOCAB)


def near(target: Target, noise: float = 0.01) -> Drafter:
    """A draft that is the target but for some noise (0: the target itself): it finds some of the
    target's beams, and not others."""
    config = LMConfig(depth=3, layers=list(range(L)), train_embeddings=True)
    return random_drafter(config, target, noise, seed=2)


@functools.cache
def theirs(
    kind: str,
    beams: int,
    new: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    eos: tuple[int, ...] = EOS,
    prompt: tuple[int, ...] = tuple(PROMPT),
) -> tuple[list[list[int]], list[float]]:
    """transformers' hypotheses, cut behind their first eos, and their scores."""
    out = make_target(kind).model.generate(
        torch.tensor([prompt]),
        num_beams=beams,
        num_return_sequences=beams,
        do_sample=False,
        max_new_tokens=new,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for ids in out.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, t in enumerate(ids) if t in eos), len(ids))
        assert set(ids[end:]) <= {0, *eos[:1]}  # padding
        found.append(ids[:end])
    return found, [] if beams == 1 else out.sequences_scores.tolist()


def assert_same(result: BeamResult, reference: tuple[list[list[int]], list[float]]) -> None:
    ids, scores = reference
    assert [h.ids for h in result.hypotheses] == ids
    assert result.ids == ids[0]
    if scores:
        assert [h.score for h in result.hypotheses] == pytest.approx(scores, abs=2e-5, rel=2e-5)


SETTINGS = [
    (beams, length_penalty, early_stopping)
    for beams in (2, 5)
    for length_penalty in (0.5, 1.0, 2.0)
    for early_stopping in (False, True, "never")
]


@pytest.mark.parametrize("kind", list(TARGETS))
def test_beam_search_is_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, with a draft near the target and with a poor one; the trunk committed always, now
    and then, and never."""
    target = make_target(kind)
    drafters = [None, near(target), make_drafter("lm", target)]
    ends, accepted = set(), 0
    for n, (beams, length_penalty, early_stopping) in enumerate(SETTINGS):
        monkeypatch.setattr(beam, "SCRATCH", (0, 20, 256)[n // 2 % 3])
        reference = theirs(kind, beams, 16, length_penalty, early_stopping)
        ends |= {ids[-1] in EOS for ids in reference[0]}
        for drafter in drafters if n % 4 == 0 else drafters[:2]:
            result = beam_search(
                target,
                PROMPT,
                beams=beams,
                max_new_tokens=16,
                drafter=drafter,
                gamma=3,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                eos=EOS,
            )
            assert_same(result, reference)
            accepted += sum(r.accepted for r in result.speculation_steps)
    assert accepted > 0
    assert (
        ends == {True, False} or kind == "gemma2"
    )  # responses that eos ends, and that the limit does


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("prompt", [(9,), (9, 4)])
def test_short_prompts_and_responses(new: int, prompt: tuple[int, ...]) -> None:
    target = make_target("qwen3")
    reference = theirs("qwen3", 3, new, prompt=prompt)
    for drafter in (None, near(target), make_drafter("eagle3", target)):
        result = beam_search(
            target, prompt, beams=3, max_new_tokens=new, drafter=drafter, gamma=3, eos=EOS
        )
        assert_same(result, reference)
        assert len(result.speculation_steps) <= new - 1


HALF = (0, 1, 3, 4, 8, 10, 11, 16, 23, 24, 26, 28, 29, 33, 34, 35, 36, 38, 39, 40)


@pytest.mark.parametrize("eos", [(), (3,), HALF])
@pytest.mark.parametrize("beams", [2, 24])
def test_any_number_of_eos_and_beams(eos: tuple[int, ...], beams: int) -> None:
    """24 beams take more candidates than the vocabulary has: transformers then fills the first
    step with beams that score -1e9. Half of the tokens as eos need more than 2 W candidates."""
    target = make_target("qwen3")
    for length_penalty in (-1.0, 0.0, 2.0):
        reference = theirs("qwen3", beams, 12, length_penalty, "never", eos)
        for drafter in (None, near(target)):
            result = beam_search(
                target,
                PROMPT,
                beams=beams,
                max_new_tokens=12,
                drafter=drafter,
                gamma=3,
                length_penalty=length_penalty,
                early_stopping="never",
                eos=eos,
            )
            assert_same(result, reference)


def test_tied_tokens_are_ordered_as_transformers_orders_them() -> None:
    """Every token of the lower half has a twin with the same logit and another embedding."""
    config = architectures(V, L, positions=128)["llama"]
    config.tie_word_embeddings = False
    target = random_target(config, seed=3)
    with torch.no_grad():
        target.model.lm_head.weight[20:40] = target.model.lm_head.weight[:20]
    ids = target.model.generate(
        torch.tensor([PROMPT]),
        num_beams=3,
        num_return_sequences=3,
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=0,
    )[:, len(PROMPT) :].tolist()
    for drafter in (None, near(target)):
        result = beam_search(
            target, PROMPT, beams=3, max_new_tokens=12, drafter=drafter, gamma=3, eos=()
        )
        assert [h.ids for h in result.hypotheses] == ids


def test_as_many_beams_as_tokens_search_every_pair() -> None:
    """Against no beam search at all: the likeliest pairs of tokens, all of them enumerated."""
    target, beams = make_target(), V
    texts = torch.tensor([[*PROMPT, x] for x in range(V)])
    log_p = target.model(texts).logits[:, -2:].log_softmax(-1)
    pairs = log_p[:, 0].diagonal()[:, None] + log_p[:, 1]
    best = pairs.flatten().topk(beams)
    for drafter in (None, near(target)):
        found = beam_search(
            target, PROMPT, beams=beams, max_new_tokens=2, drafter=drafter, length_penalty=0, eos=()
        )
        assert [h.ids for h in found.hypotheses] == [[i // V, i % V] for i in best.indices.tolist()]
        assert [h.score for h in found.hypotheses] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_one_beam_is_greedy_decoding(early_stopping: bool | str) -> None:
    """It ends at the first eos, also where a longer response would score better."""
    target = make_target("qwen3")
    greedy = generate(target, PROMPT, max_new_tokens=20, eos=EOS).ids
    assert greedy == theirs("qwen3", 1, 20)[0][0] and greedy[-1] in EOS
    for drafter in (None, near(target)):
        result = beam_search(
            target,
            PROMPT,
            beams=1,
            max_new_tokens=20,
            drafter=drafter,
            length_penalty=2.0,
            early_stopping=early_stopping,
            eos=EOS,
        )
        assert [h.ids for h in result.hypotheses] == [greedy]


@pytest.mark.parametrize("gamma", [1, 2, 3, 6])
@pytest.mark.parametrize("draft_beams", [3, 6])
def test_a_draft_that_is_the_target_makes_gamma_plus_one_steps_a_pass(
    gamma: int, draft_beams: int
) -> None:
    target, new = make_target("gpt2"), 20
    options: dict[str, Any] = {"beams": 3, "max_new_tokens": new, "eos": ()}
    plain = beam_search(target, PROMPT, **options)
    fast = beam_search(
        target, PROMPT, drafter=near(target, 0), draft_beams=draft_beams, gamma=gamma, **options
    )
    assert_same(fast, theirs("gpt2", 3, new, eos=()))
    assert (plain.steps, len(plain.speculation_steps), plain.tau) == (new, new - 1, 1)
    assert fast.steps == new
    assert len(fast.speculation_steps) == math.ceil((new - 1) / (gamma + 1))
    assert all(r.accepted == r.drafted for r in fast.speculation_steps)


@pytest.mark.parametrize("name", list(DRAFTS))
def test_every_family_drafts_and_its_rows_follow_the_beams(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beams die and branch: the caches and the hidden states of their rows must too. A draft
    without a cache, which reads every row again, makes the same speculation steps."""
    target = make_target("mistral")
    for drafter in (make_drafter(name, target), *([near(target)] if name == "lm" else [])):
        options: dict[str, Any] = {"beams": 3, "max_new_tokens": 24, "gamma": 3, "eos": EOS}
        cached = beam_search(target, PROMPT, drafter=drafter, **options)
        assert_same(cached, theirs("mistral", 3, 24))
        monkeypatch.setattr(drafter, "new_cache", lambda: None)
        plain = beam_search(target, PROMPT, drafter=drafter, **options)
        assert plain.speculation_steps == cached.speculation_steps
        assert plain.hypotheses == cached.hypotheses


def test_rows_hold_the_hidden_states_of_their_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a draft that accepts, though it only says that it reads them."""
    target, seen = make_target("qwen3"), []
    drafter, grow = near(target), beam.DraftBeams.grow
    drafter.needs = HiddenStateSpec(layers=(1, 3), final_hidden=True)

    def spied(draft: beam.DraftBeams, *args: Any) -> int:
        ctx = draft.rows.context()
        texts = [PROMPT + [n.token for n in node.path()] for node in draft.live]
        assert [ids[:n] for ids, n in zip(ctx.ids_BT.tolist(), ctx.counts(), strict=True)] == texts
        whole = target.hidden_states(torch.tensor(texts), drafter.needs)[0]
        for field in ("layers_BTF", "final_BTD"):
            if (there := getattr(whole, field)) is not None:
                here = getattr(ctx, field)
                torch.testing.assert_close(here, there[:, :-1], atol=1e-4, rtol=1e-4)
                seen.append(here.shape[1])
        depth = grow(draft, *args)
        assert not {token for _, token in args[-1]} & set(EOS)  # after which nothing would follow
        return depth

    monkeypatch.setattr(beam.DraftBeams, "grow", spied)
    result = beam_search(
        target, PROMPT, beams=3, max_new_tokens=24, drafter=drafter, gamma=3, eos=EOS
    )
    assert len(seen) > 10 and any(r.accepted for r in result.speculation_steps)


def test_statistics_add_up() -> None:
    target, width, gamma = make_target("gpt2"), 5, 4
    result = beam_search(
        target,
        PROMPT,
        beams=4,
        max_new_tokens=30,
        drafter=near(target, 0.03),
        draft_beams=width,
        gamma=gamma,
        eos=(),
    )
    speculation_steps = result.speculation_steps
    assert any(0 < r.accepted < r.drafted for r in speculation_steps)
    assert result.steps == len(result.ids) == 30
    assert result.tau == sum(r.accepted + 1 for r in speculation_steps) / len(speculation_steps)
    for r in speculation_steps:
        assert 0 <= r.accepted <= r.drafted <= gamma and r.drafted <= r.nodes <= width * r.drafted


@pytest.mark.parametrize("scratch", [0, 40, 256])
@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_dead_beams_leave_the_cache(
    kind: str, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch never holds much more than `SCRATCH` slots or twice the live beams, and reading
    again what was forgotten (in gemma2's beams, which part early: nearly all) at most doubles
    what is read."""
    target, held, score, slots = make_target(kind), [0], beam.LiveTree.score, 0

    def spied(tree: beam.LiveTree, *args: list[beam.BeamNode]) -> None:
        nonlocal slots
        before = tree.cache.scratch
        assert before <= max(scratch, 2 * tree.reread)
        score(tree, *args)
        slots += tree.cache.scratch - before
        held.append(tree.cache.lengths[0])

    monkeypatch.setattr(beam.LiveTree, "score", spied)
    monkeypatch.setattr(beam, "SCRATCH", scratch)
    result = beam_search(target, PROMPT, beams=5, max_new_tokens=60, eos=())
    assert 5 * len(result.speculation_steps) <= slots <= 2 * 5 * len(result.speculation_steps)
    assert held == sorted(held)
    if kind == "gpt2":  # whose beams agree on what lies behind them
        assert len(PROMPT) < held[-1] < len(PROMPT) + 60


@pytest.mark.parametrize(
    "options,words",
    [
        ({"beams": 0}, "beams=0: give 1 or more"),
        ({"draft_beams": 2}, "draft_beams=2 is below beams=3"),
        ({"gamma": 0}, "gamma=0: give 1 or more"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: give a whole number"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5: give a whole number"),
        ({"max_new_tokens": 500}, "do not fit the 128 positions"),
        ({"early_stopping": "always"}, "early_stopping='always' is unknown"),
        ({"prompt": []}, "no tokens"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], words: str) -> None:
    target = make_target()
    given = {"prompt": PROMPT, "beams": 3, "max_new_tokens": 5, **options}
    with pytest.raises(UserError, match=words):
        beam_search(target, drafter=near(target), **given)  # type: ignore[arg-type]
    medusa = make_drafter("medusa", target)
    with pytest.raises(UserError, match="gamma=4: this draft makes at most 3 steps"):
        beam_search(target, PROMPT, beams=3, max_new_tokens=5, drafter=medusa)
    short = near(random_target(architectures(V, L, positions=14)["gpt2"]))
    with pytest.raises(UserError, match=r"10 tokens and 5 new .* 14 positions of the draft"):
        beam_search(target, PROMPT, beams=3, max_new_tokens=5, drafter=short)

"""A decoder's speculation steps as training data: anchors, drafts and p are those that the decoder
had.

Run alone: python -m pytest tests/forcing/test_visited.py
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console

from specdec.decoding.decode import decode
from specdec.decoding.generation import Generation
from specdec.decoding.logs import log_steps, logged_steps
from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.errors import UserError
from specdec.forcing.batch import Batch
from specdec.forcing.teacher import AcceptanceTable, TeacherForcing
from specdec.losses.loss_config import LossConfig
from specdec.losses.loss_terms import LossInputs, kl, on_policy, reverse_kl
from specdec.progress import bars
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Static
from specdec.targets.target import Target
from tests.device import DEVICE
from tests.drafters.families import make_drafter, make_target, text
from tests.tiny import batch_of
from train.data.response_files import response_document
from train.data.responses import documents_of_log
from train.data.sequences import Prompt, Row, pack_rows
from train.hidden_states import filling
from train.hidden_states.batches import OnlineBatches, StoredBatches
from train.hidden_states.store import HiddenStatesConfig, HiddenStateStore

FAMILIES = ["eagle3", "medusa", "lm with adapters"]
if DEVICE.type == "cpu":  # a device can break no more of what these do
    FAMILIES += ["eagle", "lm"]
PROMPTS = [text(seed, length)[0].tolist() for seed, length in ((0, 8), (1, 6), (2, 10), (3, 8))]
NEW, LENGTH = 14, 56  # two documents a row
STEPS = 15


class Made(NamedTuple):
    """A draft, what it decoded with the target, and the batch of its speculation steps."""

    target: Target
    drafter: Drafter
    responses: list[Generation]
    source: OnlineBatches
    batch: Batch


def made(name: str, temperature: float = 0.0) -> Made:
    target = make_target()
    drafter = make_drafter(name, target, noise=0.05)
    learn_greedy_text(drafter, target)
    responses = decode(
        target, PROMPTS, Way(drafter, sampler=Sampler(temperature)), max_new_tokens=NEW, eos=()
    )
    texts = [
        response_document("", g.prompt, g.ids, logged_steps(g), drafter.depth) for g in responses
    ]
    rows = pack_rows([d for d in texts if d is not None], LENGTH)
    source = OnlineBatches(target, drafter.needs, Sampler(1.0), rows)
    return Made(target, drafter, responses, source, source.batch(range(len(rows))))


def learn_greedy_text(drafter: Drafter, target: Target) -> None:
    """Some steps on the target's own responses, so that some drafts are accepted."""
    plain = decode(target, PROMPTS, max_new_tokens=NEW, eos=())
    masks = [[False] * len(g.prompt) + [True] * NEW for g in plain]
    texts = [g.prompt + g.ids for g in plain]
    batch = batch_of(target, drafter.needs, Sampler(1.0), texts, masks)
    forcing = TeacherForcing(drafter, target, Sampler(1.0), LossConfig({"kl": 1.0}))
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], 3e-3)
    for _ in range(STEPS):
        loss, _ = forcing(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.zero_grad()


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Made:
    return made(request.param)


def by_prompt(case: Made, x_N: torch.Tensor) -> dict[int, list[list[float]]]:
    """What is known of each speculation step, in order, by the number of its prompt."""
    found: dict[int, list[list[float]]] = {}
    for place, x in zip(case.batch.visited.place_N.tolist(), x_N.tolist(), strict=True):
        row, at = divmod(place, case.batch.mask_BT.shape[1])
        found.setdefault(int(case.batch.ctx.document_BT[row, at]), []).append(x)
    return found


def test_at_zero_the_table_is_the_decoder_s_own_acceptance(case: Made) -> None:
    """Step by step: the draft that training sees proposes what was drafted, and argmax p
    accepts of it what the decoder accepted."""
    forcing = TeacherForcing(case.drafter, case.target, Sampler(1.0), visited=True)
    table = forcing(case.batch, measure=True, more=lambda piece: (piece.log_q.argmax(-1),))
    assert isinstance(table, AcceptanceTable)
    accepted = by_prompt(case, table.alpha.greedy.cumprod(-1).sum(-1))
    vocab_S = case.drafter.vocab_S
    proposed_NK = table.more[0] if vocab_S is None else vocab_S[table.more[0]]
    proposed = by_prompt(case, proposed_NK)
    steps = [r for g in case.responses for r in g.steps]
    assert sum(len(x) for x in accepted.values()) == len(steps) > 8
    for i, response in enumerate(case.responses):
        assert accepted[i] == [r.accepted for r in response.steps]
        for ours, theirs in zip(proposed[i], response.steps, strict=True):
            assert tuple(ours[: theirs.drafted]) == theirs.tokens
    counts = {r.accepted for r in steps}
    assert 0 in counts and len(counts) > 1  # both kinds, or the test would show little


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p_after_a_draft_is_that_of_a_plain_pass_over_it(temperature: float) -> None:
    case = made("lm", temperature)
    visited, ids_BT = case.batch.visited, case.batch.ctx.ids_BT
    after = 0
    for r, place in enumerate(visited.place_N.tolist()):
        row, at = divmod(place, ids_BT.shape[1])
        first = at - int(case.batch.ctx.position_BT[row, at])
        drafted = [token for token in visited.drafted_NK[r].tolist() if token >= 0]
        ids = torch.cat([ids_BT[row, first : at + 1], torch.tensor(drafted).long()])
        _, final = case.target.hidden_states(ids[None], case.drafter.needs)
        for k in range(len(drafted)):
            expected = final[0, at - first + k]
            torch.testing.assert_close(visited.final_NKD[r, k], expected, atol=1e-4, rtol=1e-4)
            z = case.target.logits(expected)
            torch.testing.assert_close(visited.summary.log_z_N[r, k], z.logsumexp(-1))
            after += k > visited.accepted_N[r]
    assert after > 5


def test_the_loss_of_a_batch_is_that_of_its_steps_one_by_one(case: Made) -> None:
    """From the drafter's `hidden` for one context each, and p of plain passes."""
    loss_config = LossConfig(terms={"on_policy": 1.0}, depth_decay=1.0)
    forcing = TeacherForcing(case.drafter, case.target, Sampler(1.0), loss_config, visited=True)
    loss, counted = forcing(case.batch)
    drafted = [r.drafted for g in case.responses for r in g.steps]
    assert counted[:, 0].tolist() == [sum(n > k for n in drafted) for k in range(3)]
    vocab_S = case.drafter.vocab_S
    total = 0.0
    for response in case.responses:
        whole = torch.tensor([response.prompt + response.ids + response.overrun])
        for r in response.steps:
            ctx, _ = case.target.hidden_states(whole[:, : r.anchor + 1], case.drafter.needs)
            chain = torch.tensor([[r.tokens]])
            anchor = torch.tensor([[r.anchor]])
            hidden = case.drafter.hidden(ctx, anchor, chain[..., :-1])[0, 0]
            path = torch.cat([whole[:, : r.anchor + 1], chain[0]], 1)
            with torch.no_grad():
                log_ps = case.target.model(path).logits[0, r.anchor :].log_softmax(-1)
            for h, (k, log_p) in zip(hidden, enumerate(log_ps)):
                log_p = log_p if vocab_S is None else log_p[vocab_S]
                log_q = case.drafter.unembed(h, k).log_softmax(-1)
                if k < r.accepted:
                    total += float((log_p.exp() * (log_p - log_q)).sum().detach())
                else:
                    total += 0.8**k * float((log_q.exp() * (log_q - log_p)).sum().detach())
    assert float(loss.detach()) == pytest.approx(total, rel=1e-4)
    loss.backward()
    grads = [p.grad for p in case.drafter.parameters() if p.requires_grad]
    assert any(g is not None and bool(g.abs().sum() > 0) for g in grads)
    case.drafter.zero_grad()


def test_draft_opd_switches_divergence_at_the_first_rejection() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p, z = torch.randn(2, 2, 3, 5, generator=generator, dtype=torch.float64)
    log_p, z = log_p.log_softmax(-1), z.requires_grad_()
    nothing = torch.zeros(2, 3)
    accepted = torch.tensor([[True, False, False], [True, True, True]])

    def piece(accepted: torch.Tensor | None) -> LossInputs:
        log_q = z.log_softmax(-1)
        unread = [nothing] * 3
        return LossInputs(log_p, log_q, nothing, nothing, accepted, *unread, accepted=accepted)

    found = on_policy(piece(accepted), decay=0.5)
    forward, reverse = kl(piece(None)), reverse_kl(piece(None))
    weight = torch.tensor([1, 0.5, 0.25])
    torch.testing.assert_close(found, torch.where(accepted, forward, reverse * weight))
    torch.testing.assert_close(on_policy(piece(None)), forward)
    (grad,) = torch.autograd.grad(found.sum(), z)
    p, q = log_p.exp(), z.detach().softmax(-1)
    ratio = q.log() - log_p
    of_reverse = q * (ratio - (q * ratio).sum(-1, keepdim=True)) * weight[:, None]
    torch.testing.assert_close(grad, torch.where(accepted[..., None], q - p, of_reverse))


def test_a_sample_of_the_anchors_keeps_their_drafts(case: Made) -> None:
    """Anchors drawn from the speculation steps read the same steps' drafts and states."""
    forcing = TeacherForcing(case.drafter, case.target, Sampler(1.0), visited=True)
    row = case.source.rows[0]
    batch = case.source.batch([0])
    anchors = forcing.anchors(row.mask, row.document, row.position, 0, row.drafted_TK)
    assert anchors.total == float((row.drafted_TK[:, 0] >= 0).sum())
    last = replace(
        anchors,
        row_N=anchors.row_N[1:],
        position_N=anchors.position_N[1:],
        weight_NK=anchors.weight_NK[1:],
    )
    first = replace(
        anchors,
        row_N=anchors.row_N[:1],
        position_N=anchors.position_N[:1],
        weight_NK=anchors.weight_NK[:1],
    )
    whole, *parts = (float(forcing(batch, [some])[0]) for some in (anchors, first, last))
    assert whole == pytest.approx(sum(parts), rel=1e-5)


def test_stored_steps_equal_those_read_online(case: Made, tmp_path: Path) -> None:
    """And a response's hidden states are shared with the same text without speculation steps."""
    cfg, needs = HiddenStatesConfig(root=str(tmp_path)), case.drafter.needs
    store = HiddenStateStore(cfg, case.target, needs, Sampler(1.0))
    rows = case.source.rows
    plain = [replace(row, speculation_steps=None) for row in rows]
    with bars(Console(quiet=True), False) as progress:
        filling.fill_from_batches(store, replace_rows(case.source, plain), progress)
        assert store.missing(plain) == [] and len(store.missing(rows)) == len(rows)
        filling.fill_from_batches(store, replace_rows(case.source, store.missing(rows)), progress)
    assert store.missing(rows) == []
    stored = StoredBatches(store, case.drafter.needs, rows, case.target.device).batch(
        range(len(rows))
    )
    ours, theirs = stored.visited, case.batch.visited
    assert torch.equal(ours.place_N, theirs.place_N)
    assert torch.equal(ours.drafted_NK, theirs.drafted_NK)
    there = theirs.drafted_NK >= 0
    torch.testing.assert_close(ours.final_NKD[there], theirs.final_NKD[there])
    assert torch.equal(ours.summary.argmax_N[there], theirs.summary.argmax_N[there])
    torch.testing.assert_close(stored.final_BTD, case.batch.final_BTD, atol=1e-4, rtol=1e-4)


def replace_rows(source: OnlineBatches, rows: list[Row]) -> OnlineBatches:
    return OnlineBatches(source.target, source.needs, source.sampler, rows)


def test_a_log_reads_back_without_held_out_prompts(tmp_path: Path) -> None:
    case = made("medusa")
    log_steps(tmp_path / "logs" / "a.jsonl", case.responses[:2])
    log_steps(tmp_path / "logs" / "a.jsonl", case.responses[2:])
    held_out = Prompt("x", np.array(PROMPTS[1], np.int32))
    found = documents_of_log(tmp_path / "logs", 2, case.target, [held_out])
    kept = [g for i, g in enumerate(case.responses) if i != 1]
    assert [d.ids.tolist() for d in found] == [g.prompt + g.ids for g in kept]
    for document, response in zip(found, kept, strict=True):
        assert document.mask.sum() == len(response.ids)
        (anchors,) = (document.speculation_steps[:, 0] >= 0).nonzero()
        drafted = [r for r in response.steps if r.drafted]
        assert anchors.tolist() == [r.anchor for r in drafted]
        for row, r in zip(document.speculation_steps[anchors].tolist(), drafted, strict=True):
            tokens = [*r.tokens[:2], -1, -1][:2]
            assert row == [min(r.accepted, 2), *tokens]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"ids": [999]}, "its ids or anchors"),
        ({"ids": []}, "its ids or anchors"),
        ({"prompt": [-1]}, "its ids or anchors"),
        ({"speculation_steps": [[90, 0, [1]]]}, "its ids or anchors"),
        ({"speculation_steps": [[2, 3, [1]]]}, "its ids or anchors"),
        ({"prompt": "words"}, "prompt: expected"),
        ({"speculation_steps": [[2, 0]]}, r"speculation_steps\[0\]: expected 3 values"),
        ({"speculation_steps": {"2": 0}}, "speculation_steps: expected"),
    ],
)
def test_a_log_of_another_target_or_shape_is_refused(
    tmp_path: Path, broken: dict[str, object], said: str
) -> None:
    record = {"prompt": [1, 2], "ids": [3, 4, 5], "speculation_steps": [[2, 0, [7, 8]]]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record | broken) + "\n")
    with pytest.raises(UserError, match=rf"a\.jsonl, record 1: {said}"):
        documents_of_log(tmp_path / "a.jsonl", 2, make_target(), [])


def test_a_log_must_exist_and_have_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        documents_of_log(tmp_path / "a.jsonl", 2, make_target(), [])
    (tmp_path / "a.jsonl").write_text('{"prompt": [1], "ids": [2], "speculation_steps": []}\n')
    with pytest.raises(UserError, match="no speculation step in it"):
        documents_of_log(tmp_path / "a.jsonl", 2, make_target(), [])


def test_trees_are_not_logged(tmp_path: Path) -> None:
    target = make_target()
    shape = Static([[0], [1], [0, 0]])
    responses = decode(
        target, PROMPTS[:1], Way(make_drafter("lm", target), shape), max_new_tokens=4
    )
    with pytest.raises(UserError, match="chains only"):
        log_steps(tmp_path / "a.jsonl", responses)

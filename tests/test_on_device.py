"""Whole jobs on a device that is not the CPU, and how often the host waits for it.

Run alone: DRAFTSMITH_TEST_DEVICE=pretend python -m pytest tests/test_on_device.py
"""

import itertools
import math
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from torch import Tensor

from specdec.context import TrainingMoment
from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.forcing.teacher import TeacherForcing
from specdec.formats.draft_export import exports
from specdec.formats.layout import LAYOUT
from specdec.losses import chunked
from specdec.losses.loss_config import LossConfig
from specdec.losses.loss_terms import LOSS_TERMS, LossInputs
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets.target import Target
from tests.device import DEVICE
from tests.drafters.families import CONFIGS, make_drafter, make_target, text
from tests.pretend import NAME, counted, module, syncs
from tests.tiny import Tiny, batch_of
from train import optim
from train.accelerated import accelerator_of

pytestmark = pytest.mark.skipif(DEVICE.type != NAME, reason=f"DRAFTSMITH_TEST_DEVICE={NAME} only")

JOBS = {  # one family of each kind
    "recurrent": ["eagle3"],
    "parallel, with a loss that autocast forbids": ["dspark", "loop.precision=bf16"],
    "model": ["lm"],
    "copying": ["suffix"],
}


@pytest.mark.parametrize("kind", list(JOBS))
def test_a_job_trains_measures_and_exports_on_a_device(tiny: Tiny, tmp_path, kind: str) -> None:
    tiny.job(tmp_path / "run", *JOBS[kind], f"target.device={NAME}", "loop.epochs=1")
    assert (tmp_path / "run" / "report" / "report.md").exists()
    exported = exports(JOBS[kind][0], LAYOUT)
    assert (tmp_path / "run" / "export").exists() == exported


def test_a_job_keeps_to_the_device_that_it_is_given(
    tiny: Tiny, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to itself, accelerate takes the first device of the machine for the draft."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", NAME)
    PartialState._reset_state()  # of an earlier run in this process
    tiny.job(tmp_path / "run", "medusa", "target.device=cpu")


@pytest.mark.parametrize("device", ["cpu", f"{NAME}:0", f"{NAME}:1"])
def test_the_processes_are_where_the_target_is(tiny: Tiny, device: str) -> None:
    """Whatever device an earlier run in this process had."""
    accelerator = accelerator_of(tiny.config("medusa", f"target.device={device}").target)
    assert accelerator.device == torch.device(device)
    moved = accelerator.prepare(torch.nn.Linear(2, 2))
    assert moved.weight.device == torch.device(device)
    if device != "cpu":
        assert torch.get_device_module(device).current_device() == torch.device(device).index
        torch.get_device_module(device).set_device(0)


def test_an_estimate_of_acceptance_is_trained_under_autocast() -> None:
    """Autocast forbids this loss where it is on. By hand: -(¾ log ½ + ¼ log ½) = log 2."""
    half = torch.full((1, 1), 0.5, requires_grad=True)
    log_p, log_q = (torch.tensor([[x]]).log() for x in ([0.75, 0.25], [0.5, 0.5]))
    anything, valid = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
    piece = LossInputs(
        log_p, log_q, anything, anything, valid, log_q, log_q, log_q, confidence=half
    )
    with torch.autocast(NAME, torch.bfloat16):
        loss = LOSS_TERMS["confidence"](piece)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
    loss.sum().backward()  # ∂/∂c = (c - β) / (c (1 - c)) with β = ½ + ¼
    assert half.grad is not None and half.grad.item() == pytest.approx(-1, rel=1e-6)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_family_trains_and_decodes_on_a_device(target: Target, name: str) -> None:
    """Greedily, it decodes what the target does alone."""
    drafter, prompt = make_drafter(name, target), text(1)[0].tolist()
    if drafter.trains(drafter.config):
        ids, mask = text(0, 20)[0].tolist(), [False] * 4 + [True] * 16
        batch = batch_of(target, drafter.needs, Sampler(1.0), [ids], [mask])
        loss, _ = TeacherForcing(drafter, target, Sampler(1.0))(batch)
        loss.backward()
    (plain,) = decode(target, [prompt], max_new_tokens=5, eos=())
    for sampler in (Sampler(0.0), Sampler(1.0)):
        way = Way(drafter, sampler=sampler)
        (made,) = decode(target, [prompt], way, max_new_tokens=5, eos=())
        assert made.ids == plain.ids or not sampler.greedy


# --- waiting -------------------------------------------------------------------------------------

# lm reads documents apart, and transformers looks for packed texts; peagle draws its depths
WAITING = {"lm": 2, "peagle": 1}
PARALLEL = ["medusa", "dflash", "dspark", "peagle"]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.mark.parametrize("name", ["eagle3", "eagle", "lm", *PARALLEL])
def test_the_host_never_waits_within_a_pass_of_training(
    target: Target, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, in chunks within chunks, with a loss that has rare cases: only in
    the family's own pass, and never because there are more chunks. Lists that a family uploads,
    which waits too, are not more either."""
    monkeypatch.setattr(chunked, "AT_ONCE_ON_GPU", 300)
    drafter, sampler = make_drafter(name, target), Sampler(1.0)
    ids, mask = text(0, 40)[0].tolist(), [False] * 4 + [True] * 36
    batch = batch_of(target, drafter.needs, sampler, [ids], [mask])
    row = batch.mask_BT[0].cpu(), torch.zeros(40, dtype=torch.int32), torch.arange(40)
    counts = []
    for chunk in (4, 64):
        forcing = TeacherForcing(drafter, target, sampler, LossConfig(chunk=chunk))
        chosen = forcing.anchors(*(x.cpu().numpy() for x in row), seed=0)
        with counted() as waits:
            loss, _ = forcing(batch, [chosen], TrainingMoment(0.5, [0]))
            loss.backward()
        counts.append(dict(waits))
        waits.pop("upload", None)
        assert sum(waits.values()) == WAITING.get(name, 0)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
@pytest.mark.parametrize("hidden", ["adamw", "muon"])
def test_the_host_waits_once_in_a_step_that_is_logged_and_never_in_others(
    tiny: Tiny,
    tmp_path,
    training_alone: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    hidden: str,
) -> None:
    """12 steps of 3 micro-batches, of which steps 4, 8 and 12 are logged. The learning rate is
    asked for once in a step, after its figures were read."""
    counts, learning_rate = list[int](), optim.learning_rate

    def asked(*given: Any) -> float:
        counts.append(sum(n for kind, n in syncs.items() if kind != "upload"))
        return learning_rate(*given)

    monkeypatch.setattr(optim, "learning_rate", asked)
    more = ["loop.accumulate=3", "loop.epochs=3", "loop.eval_every=0", "loop.save_every=0"]
    more += ["loop.log_every=4", f"target.device={NAME}", f"optim.hidden={hidden}"]
    tiny.job(tmp_path / "run", name, *more)
    waits = [b - a for a, b in itertools.pairwise(counts)]
    assert waits == [int((step % 4) == 0) for step in range(2, 13)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["eagle3", "lm", *PARALLEL])
def test_a_draft_step_does_not_wait(target: Target, name: str, temperature: float) -> None:
    """At temperature 0 a speculation step waits as often however many tokens it drafts. Above, the
    verdict on a node is awaited before its child is judged, which is two waits at a depth."""
    drafter, prompt = make_drafter(name, target), text(1)[0].tolist()
    per_step, judged = [], 2 if temperature else 0
    for gamma in (1, 3):
        with counted() as waits:
            way = Way(drafter, Chain(gamma), Sampler(temperature))
            (made,) = decode(target, [prompt], way, max_new_tokens=8, eos=())
        steps = len(made.steps)
        per_step.append((waits["item"] + waits["nonzero"] + waits["download"]) / steps)
    assert per_step[1] <= per_step[0] + 2 * judged and per_step[0] <= 8 + 4 * judged


def test_phases_are_timed_on_the_device(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator takes a millisecond of the device's time, and none of the host's."""
    step, inside = target.step, 0

    def stepped(*args: object) -> object:
        nonlocal inside
        before = module.done
        out = step(*args)  # type: ignore[arg-type]
        inside += module.done - before
        return out

    monkeypatch.setattr(target, "step", stepped)
    drafter, prompt = make_drafter("eagle3", target), text(1)[0].tolist()
    (made,) = decode(target, [prompt], Way(drafter), max_new_tokens=6, eos=())
    around = made.spent["verify"] * 1000 - inside  # what puts the pass's tokens together
    assert inside > 0 and 0 <= round(around) <= 4 * len(made.steps)


def test_buffers_that_a_graph_writes_are_marked_as_staying(target: Target) -> None:
    ids = text(1).to(DEVICE)
    marks = []
    for capacity in (None, 256):
        cache = target.new_cache(capacity)
        with torch.inference_mode():
            target.hidden_states(
                ids.expand(2, -1), make_drafter("eagle3", target).needs, cache=cache
            )
            cache.commit([ids.shape[1]] * 2)
            marks.append([_marked(layer.keys) for layer in cache.slot_layers])
            cache.select([1])
            marks.append([_marked(layer.values) for layer in cache.slot_layers])
    assert not any(marks[0] + marks[1]) and all(marks[2] + marks[3])


def _marked(buffer: Tensor) -> bool:
    return hasattr(buffer, "_dynamo_static_input_type")

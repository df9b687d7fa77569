"""The matrix of targets: a dozen architectures, one of each kind, go through what a user does with
them; and the matrix itself tells a crash, a hang and a fault from a refusal.

Run alone: python -m pytest tests/scripts/test_targets.py (under 2 minutes on 2 cores)
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UserError
from train import pipeline

FAMILIES = ["eagle3", "eagle", "mtp", "mtp_heads", "medusa", "spire", "dflash", "lm", "early_exit"]
# what is refused, of these families' drafters; every other is trained and exported
REFUSED = {
    "llama": set[str](),
    "llama, biases": {"mtp"},
    "glm": {"mtp"},  # partial rotary positions
    "gemma2": {"mtp"},  # a soft cap, norms that store 1 less
    "gemma3_text": {"mtp"},  # rotary positions by kind of layer
    "gemma3": {
        "mtp",
        "lm",
        "lm lora.rank=4",
    },  # a vision tower with as many layers
    "deepseek_v3": set[str](),  # latent attention, mixtures of experts
    "phimoe": set[str](),  # a router that is made from a linear layer
    "gpt_neox": {"mtp"},  # parallel residual
    "gpt2": {"mtp", "lm source=random"},  # learned positions
    "smollm3": set[str](),  # layers without rotary positions
    "granite_swa": set[str](),  # a theta for each layer
    # states that cannot be rolled back
    "qwen3_5": {"lm", "lm lora.rank=4", "lm source=random", "early_exit lora.rank=4"},
    # positions in the attention's bias, so that rows of equal length are read together
    "bloom": {"mtp", "lm", "lm lora.rank=4", "lm source=random", "early_exit lora.rank=4"},
    # a transform before the head, whose bias vLLM leaves out; learned positions
    "bert": {"mtp", "eagle", "dflash", "lm", "lm lora.rank=4", "lm source=random"},
    # not exported; some families read a causal model's layers
    "t5, encoder-decoder": {"medusa adapter.rank=4", "spire", "early_exit lora.rank=4"}
    | {"lm", "lm lora.rank=4", "lm source=random"},
}
AT_LOAD = {
    "xlnet": "gives other logits for a text when more tokens follow it",
    "prophetnet": "turns hidden states into logits in a way that is not supported",
    "m2m_100, encoder-decoder": "counts its decoder's positions",
}


@pytest.fixture(scope="module")
def runs() -> Iterator[Any]:
    import sys

    from tests.tiny import REPOSITORY

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "scripts"))
        from benches import targets

        yield targets.configured(FAMILIES)
    assert "benches.targets" in sys.modules


def outcomes(name: str, runs: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from benches import targets, tiny

    monkeypatch.setattr(pipeline, "finished", pipeline.finished)  # so that it is set back
    arch = next(arch for arch in tiny.architectures() if arch.name == name)
    return list(targets.outcomes_of(arch, runs, folder))


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_is_decoded_trained_for_and_exported_or_refused(
    name: str, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drafters for Llama; for the others those that are refused, and a third of the rest."""
    place = list(REFUSED).index(name)
    chosen = {
        step: overrides
        for number, (step, overrides) in enumerate(runs.items())
        if name == "llama" or step in REFUSED[name] or (number + place) % 3 == 0
    }
    found = outcomes(name, chosen, tmp_path, monkeypatch)
    assert {o.step for o in found} == {"load", "decode", *chosen}
    assert [o for o in found if o.state not in ("ok", "refused")] == []
    assert {o.step for o in found if o.state == "refused"} == REFUSED[name]


@pytest.mark.parametrize("name", AT_LOAD)
def test_an_architecture_that_would_be_read_wrongly_is_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = outcomes(name, {}, tmp_path, monkeypatch)
    assert (found.step, found.state) == ("load", "refused") and AT_LOAD[name] in found.detail


def test_every_architecture_is_in_the_matrix_once() -> None:
    from benches import targets, tiny
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = [arch.name for arch in tiny.architectures()]
    assert len(names) == len({targets.slug(name) for name in names})
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) < set(names)
    assert tiny.sample(["a", "b", "a", "a", "c"]) == ["a", "b", "c", "a"]
    assert tiny.merged({"a": {"b": 1, "c": 2}}, {"a.c": 3, "d": 4}) == {
        "a": {"b": 1, "c": 3},
        "d": 4,
    }


@pytest.mark.parametrize(
    ("how", "said"), [("crash", "exit code -9"), ("hang", "no end after 1 s"), ("none", "")]
)
def test_a_crash_or_a_hang_is_a_fault_and_loses_nothing(
    how: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came before it is kept; only an architecture without a fault is not run again."""
    from benches import targets, tiny

    calls = tmp_path / "calls"
    calls.touch()

    def outcomes_of(*_: Any) -> Iterator[Any]:
        with calls.open("a") as file:
            file.write(".")
        yield targets.StepOutcome("load", "ok")
        if how == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(1000)

    monkeypatch.setattr(targets, "outcomes_of", outcomes_of)
    arch = tiny.architectures()[:1]
    seconds = 1 if how == "hang" else 100
    fault = [targets.StepOutcome("process", targets.FAULT, said)] if said else []
    for _ in range(2):
        ((_, found),) = targets.each(arch, {}, tmp_path, 1, seconds)
        assert found == [targets.StepOutcome("load", "ok"), *fault]
    assert calls.read_text() == ("." if how == "none" else "..")


@pytest.mark.parametrize(
    ("error", "late", "state", "said"),
    [
        (UserError("no"), False, "refused", "no"),
        (UserError("no"), True, "FAULT", "after training: no"),
        (ValueError("no\nmore"), False, "FAULT", "ValueError: no"),
        (None, False, "ok", ""),
    ],
)
def test_only_one_line_before_training_is_a_refusal(
    error: Exception | None, late: bool, state: str, said: str
) -> None:
    from benches.targets import TargetSteps

    steps = TargetSteps()
    with steps.step("load", lambda: late):
        if error is not None:
            raise error
    assert (steps.outcome.state, steps.outcome.detail) == (state, said)


def test_the_page_counts_each_architecture_once() -> None:
    from benches import targets, tiny
    from benches.targets import StepOutcome

    a, b, c, d = tiny.architectures()[:4]
    decoded = [StepOutcome("load", "ok"), StepOutcome("decode", "ok", "chains")]
    refused = StepOutcome("x", "refused", "target '/a/b' (AForCausalLM) has none: give another")
    found = [
        (a, [*decoded, StepOutcome("x", "ok"), StepOutcome("y", "refused", "never")]),
        (b, [*decoded, refused, StepOutcome("y", "refused", "never")]),
        (c, [StepOutcome("load", "refused", "target: c has lumps")]),
        (
            d,
            [
                *decoded,
                StepOutcome("x", "FAULT", "ValueError: no"),
                StepOutcome("y", "refused", "never"),
            ],
        ),
    ]
    text = targets.page(found, 60.0)
    counts = dict(zip(targets.VERDICTS, [1, 1, 1, 0, 1]))
    assert all(f"| {what} | {count} |" in text for what, count in counts.items())
    assert f"| {a.name} | {a.title} | chains | 1 |  |" in text and "always refused: y." in text
    assert f"| {b.name} | {b.title} | chains | 0 | x |" in text
    assert "Of the 4 causal models that transformers makes, 0 (0%) are decoded" in text
    assert f"- this target has none: give another\n  ({b.name})" in text
    assert f"- target: it has lumps\n  ({c.name})" in text
    assert f"- ValueError: no\n  ({d.name}, x)" in text

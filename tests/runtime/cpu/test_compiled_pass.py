"""Compiled passes: a graph is used where it is built and agrees; otherwise the pass runs as it
stands, and one line says so.

Run alone: python -m pytest tests/runtime/cpu/test_compiled_pass.py
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config

from specdec.context import HiddenStateSpec
from specdec.progress import tell
from specdec.runtime.cache import SlotCache
from specdec.runtime.cpu import compiled_pass
from specdec.runtime.cpu.compiled_pass import Compiled
from tests.tiny import architectures, random_target


def double(cache: SlotCache, x: Tensor) -> tuple[Tensor, None]:
    return 2 * x, None


def fails(cache: SlotCache, x: Tensor) -> tuple[Tensor, None]:
    raise RuntimeError("InvalidCxxCompiler: no g++ was found\nand a trace")


def nearly(cache: SlotCache, x: Tensor) -> tuple[Tensor, None]:
    return 2.02 * x, None


def passed(one: Compiled, tokens: int, slots: int | None = 256) -> Tensor | None:
    """The result of a pass of so many tokens over a new cache."""
    cache, x = SlotCache(1, slots), torch.ones(1, tokens)
    cache.place(x)
    return one(cache, x=x)[0]


def with_graph(monkeypatch: pytest.MonkeyPatch, graph: Any, times: tuple[float, float]) -> Compiled:
    """A pass whose graph is the test's own, and takes the first of the two times."""
    tell.cache_clear()
    monkeypatch.setattr(compiled_pass, "_graph", lambda run, device: graph)
    monkeypatch.setattr(compiled_pass, "seconds", lambda *_: list(times))
    return Compiled(double)


@pytest.mark.parametrize(
    ("graph", "times", "used", "told"),
    [
        (lambda cache, x: (x + x, None), (1.0, 1.5), True, ""),
        (lambda cache, x: (x + x, None), (1.05, 1.0), True, ""),
        (lambda cache, x: (x + x, None), (1.5, 1.0), True, "0.67 times as fast as without"),
        (fails, (1.0, 2.0), False, "InvalidCxxCompiler: no g++ was found"),
        (nearly, (1.0, 2.0), False, "differs by 1.0e-02"),
    ],
    ids=["faster", "as fast", "slower", "no compiler", "disagrees"],
)
def test_a_graph_is_used_where_it_runs_and_agrees_whatever_the_clock_says(
    graph: Callable[..., Any],
    times: tuple[float, float],
    used: bool,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = with_graph(monkeypatch, graph, times)
    for _ in range(2):
        assert torch.equal(passed(one, 4), torch.full((1, 4), 2.0))
    assert list(one.ways.values()) == [graph if used else double]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (told != "") and all(told in line for line in lines)


def test_each_shape_is_chosen_for_once_and_no_more_than_a_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def graph(cache: SlotCache, x: Tensor) -> tuple[Tensor, None]:
        calls.append(x.shape[1])
        return double(cache, x)

    monkeypatch.setattr(compiled_pass, "GRAPHS", 2)
    one = with_graph(monkeypatch, graph, (1.0, 2.0))
    for tokens in (1, 2, 1, 2, 3, 3, 4):
        passed(one, tokens)
    assert calls == [1, 1, 2, 2, 1, 2]  # compared once and then run; what comes later, never
    assert capsys.readouterr().err.count("passes beyond 2 graphs run uncompiled") == 1


@pytest.mark.slow
def test_a_compiled_pass_is_the_pass_and_leaves_the_settings_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real graph of a tiny target; its logits are those of an eager
    pass over a growing cache."""

    def settings() -> list[Any]:
        dynamo = [getattr(dynamo_config, name) for name in compiled_pass.DYNAMO]
        return [*dynamo, inductor_config.freezing, inductor_config.cpp.enable_concat_linear]

    before = settings()
    target = random_target(architectures(31, 2)["llama"])
    fixed, growing = target.new_cache(256), target.new_cache()
    with torch.inference_mode():
        for ids in ([[5]], [[7]], [[3]]):  # one graph: each takes seconds
            found, expected = (
                target.step(torch.tensor(ids), HiddenStateSpec((1,)), cache)
                for cache in (fixed, growing)
            )
            torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)
            layers = found[0].layers_BTF, expected[0].layers_BTF
            torch.testing.assert_close(*layers, atol=1e-4, rtol=1e-4)
            fixed.commit([len(ids[0])]), growing.commit([len(ids[0])])
    (passes,) = target._compiled.values()  # type: ignore[attr-defined]
    assert isinstance(passes, Compiled) and len(passes.ways) == 1
    assert set(passes.ways.values()) == {passes.graph}
    assert settings() == before

"""The tables of docs/gpus.md: the needs of runs for targets of several sizes, by `plan=true`."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from train.plan_remedies import as_overrides, fitting_settings, with_settings
from train.planned_stages import PlannedStage
from train.planning import RunPlan, gibibytes, hours, plan_of_run
from train.run_config import CONF, composed, register

PATH = CONF.parent / "docs" / "gpus.md"
TARGETS = Path(__file__).parent / "targets"
NAMES = {
    "llama-3.1-8b": "8B (Llama 3.1)",
    "qwen3-32b": "32B (Qwen3)",
    "llama-3.1-70b": "70B (Llama 3.1)",
    "qwen3-235b-a22b": "235B (Qwen3, 22B active)",
}
DEVICE, COUNTS = "h100", (1, 8)
# 10,000 prompts of 512 tokens, answered with about 900 tokens each
JOB = ["target=model", "data.max_prompt=1024", "responses.max_new_tokens=1024"]
JOB += ["data.max_length=2048", "planning.tokens=5120000", f"planning.device={DEVICE}"]
# the job of the page's script, and the ways to hold its target
SCRIPT = ["target=model", "data=conversations", "data.path=x", "data.limit=10000"]
SCRIPT += ["data.max_prompt=2048", "responses.max_new_tokens=2048", "data.max_length=4096"]
SCRIPT += ["planning.tokens=10000000", f"planning.device={DEVICE}", "planning.devices=8"]
URL = "http://localhost:8000/v1"
HELD = {
    "`target.tensor_parallel=true hidden_states.bits=8`, as in the script": (
        ["target.tensor_parallel=true", "hidden_states.bits=8"]
    ),
    "a copy on each GPU, hidden states in bfloat16 (the defaults)": [],
    "[an engine](engines.md#hidden-states), whose own work is not counted: "
    f"`hidden_states.from={URL} decode.prompts=0 hidden_states.bits=8`": (
        [f"hidden_states.from={URL}", "decode.prompts=0", "hidden_states.bits=8"]
    ),
}
BEGIN, END = "<!-- made by scripts/docs -->", "<!-- end of what scripts/docs makes -->"


def page() -> str:
    """The page with its tables computed again."""
    return filled_in(PATH, "\n".join(_held()), "\n".join([*_memory(), "", *_gains()]))


def filled_in(path: Path, *tables: str) -> str:
    """The text of a page with these tables between its pairs of marks."""
    inside, each = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S), iter(tables)
    text = path.read_text(encoding="utf-8")
    return inside.sub(lambda _: f"{BEGIN}\n{next(each)}\n{END}", text)


def _held() -> Iterator[str]:
    register()
    path = (TARGETS / "qwen3-32b").relative_to(CONF.parent)
    yield "| how the target is held | memory of a GPU, at most | disk | time | device-hours |"
    yield "| --- | --- | --- | --- | --- |"
    for title, settings in HELD.items():
        plan = plan_of_run(composed([*SCRIPT, f"target.path={path}", *settings]))
        *stages, disk = plan.stages
        largest = max(stages, key=lambda stage: stage.bytes)
        cells = [f"{table_cell(largest)} ({largest.name})", table_cell(disk), hours(plan.seconds)]
        yield f"| {title} | {' | '.join(cells)} | {8 * plan.seconds / 3600:,.1f} |"


@cache
def plans_of(target: str, devices: int) -> tuple[RunPlan, str, RunPlan | None]:
    """The plan of the job for a target on `devices` devices; and the settings, on more devices if
    necessary, with which it fits, and their plan."""
    register()
    path = (TARGETS / target).relative_to(CONF.parent)
    plan = plan_of_run(composed([*JOB, f"target.path={path}", f"planning.devices={devices}"]))
    for more in (False, True):
        if (settings := fitting_settings(plan.cfg, plan.facts, more)) is not None:
            fits = replace(plan, cfg=with_settings(plan.cfg, settings))
            return plan, as_overrides(settings), fits
    return plan, "", None


def _memory() -> Iterator[str]:
    first, _, _ = plans_of(next(iter(NAMES)), 1)
    names = [stage.name for stage in first.stages]
    yield f"| target | {DEVICE.upper()}s | {' | '.join(names)} | fits with | time | device-hours |"
    yield "| --- " * (len(names) + 5) + "|"
    for target, title in NAMES.items():
        for devices in COUNTS:
            plan, settings, fits = plans_of(target, devices)
            cells = [table_cell(stage) for stage in plan.stages]
            cells += [f"`{settings}`" if settings else "the defaults"]
            n = fits.cfg.planning.devices if fits else 0
            cells += [hours(fits.seconds), f"{n * fits.seconds / 3600:,.1f}"] if fits else ["", ""]
            yield f"| {title} | {devices} | {' | '.join(cells)} |"


def table_cell(stage: PlannedStage) -> str:
    return gibibytes(stage.bytes) if stage.fits else f"**{gibibytes(stage.bytes)}**"


def _gains() -> Iterator[str]:
    first, _, _ = plans_of(next(iter(NAMES)), 1)
    batches = [f"batch {g.batch}: break-even α, best γ" for g in first.gains]
    yield f"| target | {' | '.join(batches)} |"
    yield "| --- " * (len(batches) + 1) + "|"
    for target, title in NAMES.items():
        plan, _, _ = plans_of(target, 1)
        cells = []
        for g in plan.gains:
            least = "none" if g.break_even is None else f"{g.break_even:.2f}"
            cells.append(f"{least}, {g.gamma} ({g.speedup:.2f} times)")
        yield f"| {title} | {' | '.join(cells)} |"

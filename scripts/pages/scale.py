"""The tables of docs/scale.md: what runs for targets of three sizes need, by `plan=true`."""

import re
from functools import cache
from pathlib import Path

from train.planning.demand import Stage, devices_for, gibibytes
from train.planning.outlook import Outlook, hours, outlook
from train.run_config import CONF, composed, register

PATH = CONF.parent / "docs" / "scale.md"
TARGETS = Path(__file__).parent / "targets"
NAMES = {
    "llama-3.1-8b": "8B (Llama 3.1)",
    "llama-3.1-70b": "70B (Llama 3.1)",
    "qwen3-235b-a22b": "235B (Qwen3, 22B active)",
}
DEVICE, COUNTS = "h100", (1, 2, 8)
# 10,000 prompts of 512 tokens, answered with about 900 tokens each
JOB = ["target=model", "data.max_prompt=1024", "answers.max_new_tokens=1024"]
JOB += ["data.max_length=2048", "planning.tokens=5120000", f"planning.device={DEVICE}"]
BEGIN, END = "<!-- made by scripts/docs -->", "<!-- end of what scripts/docs makes -->"


def page() -> str:
    """The page as it is, with its tables as the tool works them out now."""
    text = PATH.read_text(encoding="utf-8")
    inside = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    return inside.sub(lambda _: f"{BEGIN}\n{tables()}\n{END}", text)


def tables() -> str:
    return "\n".join([_memory(), "", _remedies(), "", _times()])


@cache
def outlook_of(target: str, devices: int) -> Outlook:
    """What the job needs for a target on so many devices, which hold it together if it does not fit
    one of them and can be divided by their number."""
    register()
    path = (TARGETS / target).relative_to(CONF.parent)
    job = [*JOB, f"target.path={path}", f"planning.devices={devices}"]
    alone = outlook(composed(job))
    if devices_for(alone.target, alone.device) == 1 or not alone.target.divides(devices):
        return alone
    return outlook(composed([*job, "target.tensor_parallel=true"]))


def _memory() -> str:
    names = [stage.name for stage in outlook_of(next(iter(NAMES)), 1).stages]
    lines = [f"| target | {DEVICE.upper()}s | each holds | {' | '.join(names)} | disk |"]
    lines.append("| --- " * (len(names) + 4) + "|")
    for target, title in NAMES.items():
        for devices in COUNTS:
            o = outlook_of(target, devices)
            cells = (_cell(stage) for stage in o.stages)
            disk = gibibytes(sum(o.disk.values()))
            holds = "a part" if o.divided else "a target"
            lines.append(f"| {title} | {devices} | {holds} | {' | '.join(cells)} | {disk} |")
    return "\n".join(lines)


def _cell(stage: Stage) -> str:
    return gibibytes(stage.bytes) if stage.fits else f"**{gibibytes(stage.bytes)}**"


def _remedies() -> str:
    """What the tool advises where a stage does not fit; numbers of devices and stages that need the
    same advice share a line."""
    lines = []
    for target, title in NAMES.items():
        by_advice: dict[tuple[str, str], list[str]] = {}
        for devices in COUNTS:
            stages: dict[str, list[str]] = {}
            for stage in outlook_of(target, devices).stages:
                if not stage.fits:
                    stages.setdefault(stage.remedy, []).append(stage.name)
            for remedy, names in stages.items():
                by_advice.setdefault((", ".join(names), remedy), []).append(str(devices))
        for (affected, remedy), counts in by_advice.items():
            lines.append(f"- {title} on {' or '.join(counts)}, {affected}: {remedy}.")
    return "\n".join(lines)


def _times() -> str:
    o = outlook_of(next(iter(NAMES)), 1)
    batches = " | ".join(f"batch {g.batch}: break-even α, best γ" for g in o.gains)
    lines = [f"| target | {DEVICE.upper()}s | time | {batches} |"]
    lines.append("| --- " * (len(o.gains) + 3) + "|")
    for target, title in NAMES.items():
        for devices in COUNTS:
            o = outlook_of(target, devices)
            cells = []
            for g in o.gains:
                least = "none" if g.break_even is None else f"{g.break_even:.2f}"
                cells.append(f"{least}, {g.gamma} ({g.speedup:.2f} times)")
            enough = devices >= devices_for(o.target, o.device)
            time = hours(o.time.seconds) if enough else "does not fit"
            lines.append(f"| {title} | {devices} | {time} | {' | '.join(cells)} |")
    return "\n".join(lines)

"""`plan=true`: the memory and time that a run needs, its cost, and the gain of a draft, before
anything is loaded or trained.

The table of bytes and seconds is in planned_stages.py, the settings that help in plan_remedies.py.
On this machine, steps of the target and of training are measured first; other devices are estimates
from their data sheets.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState

from specdec.errors import UserError, require
from specdec.files import make_folder
from specdec.measure.decoded_prompts import FEWEST_PROMPTS
from specdec.progress import console
from specdec.ranks import ALONE
from specdec.report.plots import write_filled_devices
from specdec.runtime.device import capability
from specdec.targets.adapter import require_mergeable
from specdec.targets.checkpoint_files import file_of_model
from specdec.targets.gguf import model_path
from specdec.targets.loading import TargetLoader
from specdec.targets.target_config import resolved
from specdec.targets.tensor_parallel import require_plain, rules_of
from train.accelerated import accelerator_of
from train.budget import TEXTS
from train.data.lengths import DataLengths
from train.data.rendering import own_chat_template, prompt_rendering
from train.data.response_files import cut_responses_in_cache
from train.data.run_data import DataCounts
from train.data.sequences import Document, Prompt
from train.data.sources import files_of
from train.data.split import SHARE, parts_of
from train.initialisation import earlier_drafts
from train.machine_timing import timed_device, timed_speculation, timed_training
from train.plan_remedies import Settings, as_overrides, fitting_settings, remedies, with_settings
from train.planned_stages import (
    ROOM,
    DataAmount,
    Facts,
    PlannedStage,
    PredictedGain,
    gain,
    operations_of_training,
    speculation_costs,
    stages_of,
)
from train.run_config import Config
from train.run_documents import split_of_run
from train.sizes import (
    DEVICES,
    GIB,
    device_here,
    draft_sizes,
    sizes_of_target,
)
from train.target_defaults import tokenizer_of, with_target_defaults

BATCHES = (1, 8, 32, 128)  # for which a draft's gain is worked out
PAYS = 1.02  # the least speedup that counts as one
SAMPLED = 400  # conversations that are read if planning.tokens says how many there are
ASSUMED = 20_000_000  # tokens of the training texts, if there is no tokenizer to count them with
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


@dataclass(frozen=True)
class RunPlan:
    """The needs, the time and the gain of a run."""

    cfg: Config
    facts: Facts

    @property
    def stages(self) -> list[PlannedStage]:
        return stages_of(self.cfg, self.facts)

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def gains(self) -> list[PredictedGain]:
        alpha = self.cfg.planning.alpha
        return [gain(batch, alpha, c, v) for batch, (c, v) in self.facts.costs.items()]

    def __str__(self) -> str:
        f, n, t = self.facts, self.cfg.planning.devices, self.facts.target
        engines = self.cfg.response_generation.engines
        of_draft = "no weights that can be counted without those of the target"
        if f.draft is not None:
            of_draft = f"{_count(f.draft.weights)} weights, {_count(f.draft.trained)} are trained"
        how = "an estimate from the data sheet: nobody has measured it"
        if f.device.name == "this machine":
            how = "estimated from matrix products here"
        how = "from steps measured here" if f.measured else how
        return "\n".join(
            [
                f"target {t.title}: {_count(t.weights)} weights ({_count(int(t.active))} for a "
                f"token), {gibibytes(t.bytes)}; a token takes {t.cached / 1024:,.0f} KiB of KV "
                "cache",
                f"draft: {of_draft}",
                f"data: {f.data.conversations:,} conversations to train on, "
                f"{_count(f.data.tokens)} tokens ({f.data.known})",
                *f.data.lengths,
                *f.decided,
                *([] if f.cut is None else [f"stored so far: {f.cut}"]),
                "",
                f"GiB on each of {n} × {f.device.name} with {gibibytes(f.device.memory)}, and on "
                "disk",
                table(self.stages),
                "",
                *self.advice(),
                f"time ({how}): {hours(self.seconds)} on {n} {'device' if n == 1 else 'devices'}"
                f" = {n * self.seconds / 3600:,.1f} device-hours"
                f"{'; responses of engines are not counted' if engines else ''}",
                *self._beyond_budget(),
                f"gain ({how}), if a share α = {self.cfg.planning.alpha:g} of the drafts is "
                f"accepted:{'' if f.costs else ' unknown until the draft is made'}",
                *map(_of_gain, self.gains),
                self.verdict,
            ]
        )

    def _beyond_budget(self) -> Iterator[str]:
        """A line if the least that a run does takes longer than its budget."""
        minutes = self.cfg.budget.minutes
        if minutes is not None and self.seconds > 66 * minutes:
            yield (
                f"budget.minutes={minutes:g} is too short here: "
                f"{self.facts.data.conversations:,} conversations and "
                f"{min(FEWEST_PROMPTS, self.facts.data.prompts)} measured prompts, the least that "
                f"a run does, take {hours(self.seconds)}: give "
                f"budget.minutes={math.ceil(self.seconds / 60)}"
            )

    def advice(self) -> Iterator[str]:
        """Settings for each stage that does not fit, and for all of them together, with the time of
        the run. If all fit: tensor parallelism, if the run then takes less than two thirds of the
        time or of the device-hours."""
        for stage in self.stages:
            if not stage.fits:
                helping = remedies(self.cfg, self.facts, stage.name)
                yield f"{stage.name}: does not fit{'; each of these helps:' * bool(helping)}"
                for settings in helping:
                    plan = self._with(settings)
                    yield f"  {as_overrides(settings)}  # {plan.cost}"
        if self.fits:
            if (faster := self._faster()) is not None:
                yield f"faster, as larger batches fit: {self._with(faster).cost}"
                yield f"  {as_overrides(faster)}"
            return
        for more in (False, True):
            if (fitting := fitting_settings(self.cfg, self.facts, more)) is not None:
                engine = any(key.endswith(".from") for key in fitting)
                beside = ", beside an engine on other devices" * engine
                yield f"all stages fit with these settings{beside}: {self._with(fitting).cost}"
                yield f"  {as_overrides(fitting)}"
                return
        yield "no settings were found with which all stages fit"

    def _with(self, settings: Settings) -> "RunPlan":
        return replace(self, cfg=with_settings(self.cfg, settings))

    def _faster(self) -> Settings | None:
        """Tensor parallelism over as many of the devices as can divide the target, if the run then
        fits and takes less than two thirds of the device-hours, and no longer."""
        n = self.cfg.planning.devices
        processes = self.facts.target.most_processes(n)
        if processes is None:
            return None
        settings: dict[str, Any] = {"target.tensor_parallel": True}
        if processes != n:
            settings = {"planning.devices": processes, **settings}
        try:
            plan = self._with(settings)
        except UserError:  # this way of holding the target does not go with the other settings
            return None
        cheaper = processes * plan.seconds < n * self.seconds / 1.5
        return settings if plan.fits and plan.seconds <= self.seconds and cheaper else None

    @property
    def cost(self) -> str:
        """The time of the run, its devices and the device-hours."""
        n = self.cfg.planning.devices
        spent = f"{n * self.seconds / 3600:,.1f} device-hours"
        return f"{hours(self.seconds)} on {n} × {self.facts.device.name}, {spent}"

    @property
    def verdict(self) -> str:
        """Whether the run fits and pays."""
        pays = [g for g in self.gains if g.gamma and g.speedup >= PAYS]
        alpha = f"α = {self.cfg.planning.alpha:g} (planning.alpha)"
        gains = f"will not pay at {alpha}"
        if pays:
            at = ", ".join(str(g.batch) for g in pays)
            best = max(g.speedup for g in pays)
            gains = f"at {alpha} it will pay at batch {at}: up to {best:.2f} times as fast"
        gains = gains if self.gains else "whether it pays is unknown"
        where = f"{self.cfg.planning.devices} × {self.facts.device.name}"
        return f"this run {'fits' if self.fits else 'does not fit'} on {where}, and {gains}"


def table(stages: Sequence[PlannedStage]) -> str:
    """The table in GiB and hours, by stage."""
    names = dict.fromkeys(name for stage in stages for name in stage.filled)
    rows = [["", *(stage.name for stage in stages)]]
    for name in names:
        cells = (stage.filled.get(name, 0) / GIB for stage in stages)
        rows.append([name, *(f"{x:,.2f}" if x >= 0.005 else "" for x in cells)])
    rows.append(["all", *(f"{stage.bytes / GIB:,.2f}" for stage in stages)])
    rows.append(
        ["planned for", *("" if math.isinf(s.room) else f"{s.room / GIB:,.2f}" for s in stages)]
    )
    rows.append(["", *map(_fits, stages)])
    rows.append(["time", *(hours(s.seconds) if s.seconds else "" for s in stages)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _fits(stage: PlannedStage) -> str:
    if math.isinf(stage.room):  # the disk of another machine
        return "not checked"
    return "fits" if stage.fits else "too much"


def print_plan(cfg: Config, folder: Path) -> None:
    """Print the plan of a run, and draw its table as plan.png in the run's folder. Raises UserError
    as `plan_of_run` does."""
    plan = plan_of_run(cfg)
    if PartialState().is_main_process:
        console.print(str(plan), soft_wrap=True, highlight=False)
        picture = make_folder(folder) / "plan.png"
        filled = {stage.name: stage.filled for stage in plan.stages}
        *_, disk = plan.stages
        write_filled_devices(picture, filled, ROOM * plan.facts.device.memory, disk.name)
        console.print(f"picture: {picture}")


def plan_of_run(cfg: Config) -> RunPlan:
    """The plan of this configuration's run. Raises UserError if the target has no config or the
    data cannot be read."""
    planning, here = cfg.planning, cfg.planning.device == "here"
    cfg, decided = with_target_defaults(cfg)
    if here:
        accelerator = accelerator_of(cfg.target, cfg.loop.precision)
        target = resolved(replace(cfg.target, device=str(accelerator.device)))
    else:
        dtype = "bfloat16" if cfg.target.dtype == "auto" else cfg.target.dtype
        target = replace(cfg.target, dtype=dtype, device="cpu")
    cfg = replace(cfg, target=target)
    device = DEVICES.get(planning.device)
    computes = capability(accelerator.device) if device is None else device.capability
    sizes, parts = sizes_of_target(target, target.dtype, computes)
    if target.adapter is not None:
        require_mergeable(target, parts.model.config)
    if target.tensor_parallel:
        require(
            planning.devices > 1,
            "planning.devices=1: target.tensor_parallel divides the target over several devices: "
            "give their number, or target.tensor_parallel=false",
        )
        title = f"target.path={target.path!r}"
        require_plain(parts.model.config, title)
        rules_of(parts.model, title, planning.devices)
    draft = draft_sizes(cfg.drafter, parts, cfg.optim) if cfg.trains else None
    if device is None:
        device = device_here(accelerator.device, parts.dtype)
    whole = None  # a target that several devices hold is not loaded here
    if (
        here
        and not target.tensor_parallel
        and _has_weights(cfg)
        and sizes.bytes < 0.8 * device.memory
    ):
        whole = TargetLoader(target).whole()
    data, texts = _data_of_run(cfg, whole or parts)
    by_batch = {b: speculation_costs(sizes, draft, device, b) for b in BATCHES} if draft else {}
    free, merged = _free_disk(cfg) if here else math.inf, sizes.bytes if target.adapter else 0.0
    facts = Facts(sizes, draft, device, data, by_batch, free, merged)
    if whole is not None and texts:
        prompts = [text for text in texts if isinstance(text, Prompt)]
        cut = cut_responses_in_cache(whole, prompts, cfg.response_generation) if prompts else None
        console.print("timing this machine, for up to a minute")
        device = timed_device(cfg, sizes, device, whole, texts[0].ids)
        if draft is not None:
            tokens, seconds = timed_training(cfg, whole, texts, accelerator)
            operations = tokens * operations_of_training(cfg, sizes, draft)
            device = replace(device, training=operations / seconds)
        timed = timed_speculation(cfg, whole, texts)
        facts = replace(facts, device=device, costs=timed, measured=True, cut=cut)
    if cfg.budget.minutes is not None:
        facts = replace(facts, data=_within(cfg, facts))
    return RunPlan(cfg, replace(facts, decided=decided))


def _within(cfg: Config, facts: Facts) -> DataAmount:
    """The part of the data that `budget.minutes` allows: the conversations that are written in the
    texts' share of the time, and at least `budget.floor`."""
    data, seconds = facts.data, 60 * (cfg.budget.minutes or math.inf)
    stages = {stage.name: stage.seconds for stage in stages_of(cfg, facts)}
    writing = stages.get("responses", 0.0) + stages.get("hidden states", 0.0)
    others = sum(stages.values()) - writing
    share = max(TEXTS * seconds, seconds - others) / writing if writing else 1.0
    n = max(min(cfg.budget.floor, data.conversations), int(share * data.conversations))
    if n >= data.conversations:
        return data
    known = f"{data.known}; of {data.conversations:,}, as many as fit budget.minutes"
    tokens = round(data.tokens * n / data.conversations)
    return replace(data, conversations=n, tokens=tokens, known=known)


def _data_of_run(cfg: Config, parts: Any) -> tuple[DataAmount, list[Document | Prompt]]:
    """The amount of data of a run, and a sample of it, read as the run does (`split_of_run`); with
    `planning.tokens`, that amount."""
    asked, responds = cfg.planning.tokens, cfg.data.responses == "target"
    parts.tokenizer = parts.tokenizer or tokenizer_of(cfg.target)
    chat_template = own_chat_template(cfg.data)
    parts.render_prompts_with(prompt_rendering(cfg.data, parts.tokenizer, chat_template))

    def amount(n: int, tokens: int, known: str) -> DataAmount:
        held_out = max(1, round(n * (SHARE if cfg.data.held_out is None else cfg.data.held_out)))
        validation, test = parts_of(held_out, cfg.data.validation)
        prompt = min(tokens / n, cfg.data.longest_prompt)
        return DataAmount(n, tokens, validation or held_out, test, prompt, known)

    if parts.tokenizer is None:
        if not asked:
            files_of(cfg.data)  # raises for a file that does not exist
        length = (cfg.data.longest_prompt if responds else cfg.data.longest_document) // 2
        if asked is None and (limit := cfg.data.limit) is not None:
            longest = "data.max_prompt" if responds else "data.max_length"
            known = f"data.limit, of {length:,} tokens each, half of {longest}, as is assumed"
            return amount(limit, limit * length, known), []
        tokens = asked or ASSUMED
        known = "as planning.tokens says" if asked else "assumed: planning.tokens sets it"
        return amount(max(1, tokens // length), tokens, known), []
    if asked:
        few = min(SAMPLED, cfg.data.limit or SAMPLED)
        with console.capture():  # messages on a sample are not true of all data
            split = split_of_run(replace(cfg.data, limit=few), cfg.responses, parts, ALONE)
        mean = np.mean([len(text.ids) for text in split.train])
        planned = amount(max(1, round(asked / mean)), asked, "as planning.tokens says")
        lengths = [f"of a sample: {line}" for line in DataLengths.of_split(cfg.data, split).lines()]
        return replace(planned, lengths=lengths), split.train
    console.print(
        f"reading {cfg.data.name} as the run does (planning.tokens=NUMBER plans without counting)"
    )
    starts_from = earlier_drafts(cfg.initialisation, cfg.drafter)
    split = split_of_run(cfg.data, cfg.responses, parts, ALONE, cfg.drafter.depth, starts_from)
    counts, prompts = DataCounts.of_split(split), [len(prompt.ids) for prompt in split.prompts]
    amount_read = DataAmount(
        conversations=counts.train,
        tokens=counts.train_tokens,
        validation=len(split.validation),
        prompts=len(prompts),
        prompt=sum(prompts) / max(1, len(prompts)),
        known=f"counted in {counts.records:,} records",
        split=split,
        lengths=DataLengths.of_split(cfg.data, split).lines(),
    )
    return amount_read, split.train


def _has_weights(cfg: Config) -> bool:
    """Whether the target's weights are on this machine. Nothing is downloaded."""
    path = model_path(cfg.target.path, Path(cfg.target.cache))
    if Path(path).is_dir():
        return any((Path(path) / name).is_file() for name in WEIGHTS)
    revision = cfg.target.revision
    return any(file_of_model(path, name, revision, downloads=False) for name in WEIGHTS)


def _free_disk(cfg: Config) -> float:
    """The bytes that are free where the hidden states, the largest files, will be."""
    folder = Path(cfg.hidden_states.path or cfg.hidden_states.root).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return float(shutil.disk_usage(there).free)


def _of_gain(at: PredictedGain) -> str:
    if at.break_even is None:
        return f"  batch {at.batch}: no draft of this kind pays, however often it is accepted"
    least = f"  batch {at.batch}: pays above α = {at.break_even:.2f}"
    if not at.gamma:
        return f"{least}: not here"
    size = "1 token" if at.gamma == 1 else f"{at.gamma} tokens"
    return f"{least}; chains of {size} are {at.speedup:.2f} times as fast"


def _count(number: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:,.1f} {letter}"
    return str(number)


def gibibytes(count: float) -> str:
    """A number of bytes in GiB, or in MiB if it is small."""
    return f"{count / GIB:,.1f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:,.0f} MiB"


def hours(seconds: float) -> str:
    """A time in hours, minutes or seconds."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"

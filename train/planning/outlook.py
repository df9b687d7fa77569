"""What a configuration's run needs, how long it takes and whether it will pay: measured on this
machine as far as the target is there, and by arithmetic for other devices."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator, PartialState
from transformers import AutoTokenizer
from transformers.utils.hub import cached_file

from specdec.decoding.way import Way
from specdec.errors import UserError, first_line, require
from specdec.measure.costs import costs
from specdec.measure.results import CutResponses
from specdec.measure.setup import Setup
from specdec.progress import console
from specdec.ranks import ALONE
from specdec.sampling.trees import Chain
from specdec.targets.gguf import model_path
from specdec.targets.loading import TargetLoader
from specdec.targets.target import Target
from specdec.targets.target_config import resolved
from specdec.targets.tensor_parallel import require_plain, rules_of
from specdec.theory.leviathan import pass_cost
from train.accelerated import accelerator_of
from train.budget_plan import SAID, Plan, Speeds, fitted, minutes, of_size
from train.budget_timing import rehearsal, timed, work_of
from train.data.response_files import cut_responses_in_cache
from train.data.run_data import DataCounts
from train.data.sequences import Document, Prompt
from train.data.split import SHARE, DataSplit, parts_of
from train.initialisation import StageConfig, earlier_drafts, initial_drafter
from train.planning.demand import (
    Stage,
    disk_bytes,
    gibibytes,
    round_costs,
    speeds_of,
    stages,
)
from train.planning.devices import DEVICES, Device, measured
from train.planning.gain import Gain, RoundCosts, gain
from train.planning.outline import DraftOutline, Outline, draft_outline, outline
from train.run_config import Config
from train.run_documents import split_of_run

SAMPLED = 400  # conversations that are timed if planning.tokens says how many there are
ASSUMED = 20_000_000  # tokens of the training texts, if there is no tokenizer to count them with
TURNS = {1: 9, 8: 5, 32: 3}  # timings of each part of a round, by batch
MANY = (
    32  # rows of the batch with which answers are timed: larger ones take longer than is worth it
)
LENGTH = 96  # tokens of the text that is decoded to time rounds
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


@dataclass(frozen=True)
class Amount:
    """The training texts: how many conversations, of how many tokens before the target answers
    them, and how that is known; and all that the run reads, unless `planning.tokens` is given."""

    conversations: int
    tokens: int
    known: str
    split: DataSplit[Any] | None = None


@dataclass(frozen=True)
class Outlook:
    """What a run needs and gains."""

    target: Outline
    draft: DraftOutline | None
    device: Device
    devices: int
    amount: Amount
    stages: Sequence[Stage]
    disk: dict[str, float]
    free: float | None  # on the disk of this machine
    time: Plan
    gains: Sequence[Gain]
    alpha: float
    measured: bool  # whether the times are this machine's own
    engines: bool  # whether engines answer
    divided: bool = False  # whether the devices hold the target together
    cut: CutResponses | None = None  # of responses that earlier runs have stored

    @property
    def fits(self) -> bool:
        """Whether every stage fits the memory, and all files the disk."""
        return all(stage.fits for stage in self.stages) and not self.short

    @property
    def short(self) -> bool:
        return self.free is not None and sum(self.disk.values()) > self.free

    def __str__(self) -> str:
        t, where = self.target, f"{self.devices} × {self.device.name}"
        how = "measured" if self.measured else "by arithmetic"
        lines = [
            f"target {t.title}: {_count(t.weights)} weights ({_count(int(t.active))} for a token), "
            f"{gibibytes(t.bytes)}; a token takes {t.cached / 1024:,.0f} KiB of KV cache",
            self._of_draft(),
            f"texts: {self.amount.conversations:,} conversations to train on, "
            f"{_count(self.amount.tokens)} tokens ({self.amount.known})",
            *([] if self.cut is None else [f"stored so far: {self.cut}"]),
            f"memory on each device, {where}, {gibibytes(self.device.memory)} each"
            f"{', which hold the target together' * self.divided}:",
            *(f"  {self._of_stage(stage)}" for stage in self.stages),
            f"disk: {gibibytes(sum(self.disk.values()))} "
            f"({', '.join(f'{name} {gibibytes(size)}' for name, size in self.disk.items())})"
            f"{'' if self.free is None else f'; {gibibytes(self.free)} are free'}"
            f"{'; ' + FREE_DISK if self.short else ''}",
            f"time ({how}): {self._times()}",
            f"gain ({how}):",
            *(f"  {_of_gain(g, self.alpha)}" for g in self.gains),
        ]
        if not self.gains:
            lines[-1] += " unknown until the draft is made"
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """Whether the run fits and pays, in a line."""
        pays = [g.batch for g in self.gains if g.pays]
        best = max(self.gains, key=lambda g: g.speedup, default=None)
        gains = f"will not pay at α = {self.alpha:g}"
        if pays and best is not None:
            at = " and ".join(map(str, pays))
            gains = f"will pay at batch {at}: up to {best.speedup:.2f} times as fast"
        if not self.gains:
            gains = "whether it pays is unknown"
        return f"this run {'fits' if self.fits else 'does not fit'} here, and {gains}"

    def _of_draft(self) -> str:
        if self.draft is None:
            return "draft: it has no weights that could be counted without those of the target"
        d = self.draft
        return f"draft: {_count(d.weights)} weights, of which {_count(d.trained)} are trained"

    def _of_stage(self, stage: Stage) -> str:
        needed = f"{stage.name}: {gibibytes(stage.bytes)}"
        return needed if stage.fits else f"{needed}, which does not fit: {stage.remedy}"

    def _times(self) -> str:
        time = self.time
        stages = {"answers": time.answering, "features": time.reading}
        stages |= {"training": time.training, "measuring": time.measuring}
        parts = ", ".join(f"{name} {hours(s)}" for name, s in stages.items() if s >= 1)
        parts += "; the engines' answers are not counted" * self.engines
        size = (
            ""
            if time.conversations == time.available
            else (f"{time.conversations:,} conversations, as many as fit budget.minutes: ")
        )
        return f"{size}{hours(time.seconds)} ({parts})"


FREE_DISK = (
    "give features.bits=8 or features.cache=online, or folders on another disk with features.root"
)


def say(cfg: Config) -> None:
    """Print the outlook of a run; nothing is written. Raises UserError as `outlook` does."""
    said = str(outlook(cfg))
    if PartialState().is_main_process:
        console.print(said)


def outlook(cfg: Config) -> Outlook:
    """What this configuration's run needs and gains. Raises UserError if the target has no config
    or the data cannot be read."""
    planning, here = cfg.planning, cfg.planning.device == "here"
    if here:
        accelerator = accelerator_of(cfg.target, cfg.loop.precision)
        target = resolved(replace(cfg.target, device=str(accelerator.device)))
    else:
        dtype = "bfloat16" if cfg.target.dtype == "auto" else cfg.target.dtype
        target = replace(cfg.target, dtype=dtype, device="cpu")
    cfg = replace(cfg, target=target)
    on_cpu = here and accelerator.device.type == "cpu"
    of_target, parts = outline(cfg.target, cfg.target.dtype, on_cpu)
    if cfg.target.tensor_parallel:
        require(
            planning.devices > 1,
            "planning.devices=1: target.tensor_parallel divides the target over several devices: "
            "give their number, or leave target.tensor_parallel out",
        )
        title = f"target.path={cfg.target.path!r}"
        require_plain(parts.model.config, title)
        rules_of(parts.model, title, planning.devices)
    of_draft = draft_outline(cfg.drafter, parts) if cfg.trains else None
    device = DEVICES[planning.device] if not here else measured(accelerator.device, parts.dtype)
    whole, divided = None, cfg.target.tensor_parallel  # then it is not loaded in one piece here
    if here and not divided and _has_weights(cfg) and of_target.bytes < 0.8 * device.memory:
        whole = TargetLoader(cfg.target).whole()
    amount, texts = _amount(cfg, parts if whole is None else whole)
    speeds = speeds_of(cfg, of_target, of_draft, device, planning.devices)
    rounds, closed_form_start = list[RoundCosts](), False
    if of_draft is not None:
        rounds = [round_costs(of_target, of_draft, device, b) for b in TURNS]
    timed_here = whole is not None and bool(texts)
    prompts, cut = [text for text in texts if isinstance(text, Prompt)], None
    if whole is not None and prompts:
        cut = cut_responses_in_cache(whole, prompts, cfg.answering)
    if whole is not None and texts:
        console.print("timing this machine, for up to a minute")
        speeds, closed_form_start = _speeds_here(cfg, whole, texts, accelerator)
        rounds = _rounds_here(cfg, whole, texts)
    return Outlook(
        target=of_target,
        draft=of_draft,
        device=device,
        devices=planning.devices,
        amount=amount,
        stages=stages(cfg, of_target, of_draft, device, planning.devices),
        free=_free_disk(cfg) if here else None,
        gains=[gain(costs, planning.alpha) for costs in rounds],
        alpha=planning.alpha,
        measured=timed_here,
        engines=bool(cfg.answering.engines),
        divided=divided,
        cut=cut,
        **_time_and_disk(cfg, of_target, of_draft, amount, speeds, closed_form_start),
    )


def _time_and_disk(
    cfg: Config,
    target: Outline,
    draft: DraftOutline | None,
    amount: Amount,
    speeds: Speeds,
    closed_form_start: bool,
) -> dict[str, Any]:
    """How long the run takes at these speeds, as much of it as fits `budget.minutes` if that is
    given, and what it writes."""
    n, split = amount.conversations, amount.split
    if split is None:
        share = cfg.data.held_out if cfg.data.held_out is not None else SHARE
        held = max(1, round(n * share))
        validation, test = parts_of(held, cfg.data.validation)
        prompts, asked = (test, held - test), amount.tokens / n
        each = [[round(amount.tokens / n)] * count for count in (n, validation)]
        sides = (n, amount.tokens), (validation, round(amount.tokens * validation / n))
    else:
        prompts = len(split.prompts), len(split.validation_prompts)
        asked = float(np.mean([len(prompt.ids) for prompt in split.prompts]))
        each = [[len(text.ids) for text in side] for side in (split.train, split.validation)]
        sides = (n, sum(each[0])), (len(each[1]), sum(each[1]))
    work = work_of(cfg, prompts, asked, cfg.planning.devices, closed_form_start)
    if cfg.answering.engines:  # this process reads the answers, and its time does not tell theirs
        work, speeds = replace(work, kept=False), replace(speeds, answered=0.0)
    if cfg.budget.minutes is None:
        time = of_size(*sides, speeds, work, work.prompts, n)
        time = replace(time, answering=0.0) if cfg.answering.engines else time
    else:
        time = fitted(60 * cfg.budget.minutes, cfg.budget.floor, speeds, work, *each)
    texts = time.conversations + len(each[1])
    tokens = texts * (amount.tokens / n + SAID * work.new)
    return {"time": time, "disk": disk_bytes(cfg, target, draft, tokens)}


def _amount(cfg: Config, parts: Any) -> tuple[Amount, list[Document | Prompt]]:
    """How much there is to train on, and some of it: what a run reads (`split_of_run`), unless
    `planning.tokens` says how much that is."""
    asked, answering = cfg.planning.tokens, cfg.data.answers == "target"
    tokenizer = parts.tokenizer or _tokenizer(cfg)
    if tokenizer is None:
        tokens = asked or ASSUMED
        length = cfg.data.max_prompt // 2 if answering else cfg.data.max_length // 2
        known = "as planning.tokens says" if asked else "assumed: planning.tokens sets it"
        return Amount(max(1, tokens // length), tokens, known), []
    parts.tokenizer = tokenizer
    if asked:
        few = min(SAMPLED, cfg.data.limit or SAMPLED)
        with console.capture():  # what is said of a sample of the data is not true of all of it
            split = split_of_run(replace(cfg.data, limit=few), cfg.answers, parts, ALONE)
        mean = np.mean([len(text.ids) for text in split.train])
        return Amount(max(1, round(asked / mean)), asked, "as planning.tokens says"), split.train
    console.print(
        f"reading {cfg.data.name} as the run does (planning.tokens=NUMBER plans without counting)"
    )
    starts_from = earlier_drafts(cfg.stage, cfg.drafter)
    split = split_of_run(cfg.data, cfg.answers, parts, ALONE, cfg.drafter.depth, starts_from)
    counts = DataCounts.of_split(split)
    known = f"counted in {counts.records:,} records"
    return Amount(counts.train, counts.train_tokens, known, split), split.train


def _tokenizer(cfg: Config) -> Any:
    """The target's tokenizer; None where there is only a config, for which transformers would make
    an empty one."""
    path, options = (
        model_path(cfg.target.path, Path(cfg.target.cache)),
        {"revision": cfg.target.revision},
    )
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    try:
        trusted = cfg.target.trust_remote_code
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trusted, **options)
    except Exception:  # transformers raises errors of many classes for a folder without one
        return None


def _has_weights(cfg: Config) -> bool:
    """Whether the target's weights are on this machine. Nothing is downloaded."""
    path = model_path(cfg.target.path, Path(cfg.target.cache))
    if Path(path).is_dir():
        return any((Path(path) / name).is_file() for name in WEIGHTS)
    options: Any = {"_raise_exceptions_for_missing_entries": False}
    options |= {"_raise_exceptions_for_connection_errors": False, "local_files_only": True}
    return any(
        cached_file(path, name, revision=cfg.target.revision, **options) is not None
        for name in WEIGHTS
    )


def _speeds_here(
    cfg: Config,
    target: Target,
    texts: Sequence[Document | Prompt],
    accelerator: Accelerator,
) -> tuple[Speeds, bool]:
    """The speeds of this machine with `planning.devices` of its devices, and whether the run solves
    for its start."""
    answering = cfg.data.answers == "target"
    on_gpu = target.device.type != "cpu"
    batch = min(MANY, cfg.answers.at_once(on_gpu) if answering else cfg.decode.counting)
    context = LENGTH
    if answering:
        mean = float(np.mean([len(text.ids) for text in texts]))
        context = round(mean + SAID * cfg.answers.max_new_tokens / 2)
    step, closed_form_start = rehearsal(cfg, target, texts, accelerator)
    speeds = timed(target, [text.ids.tolist() for text in texts], batch, step, context)
    shared = {
        name: getattr(speeds, name) / cfg.planning.devices
        for name in ("read", "answered", "trained")
    }
    return replace(speeds, **shared), closed_form_start and cfg.stage.draft is None


def _rounds_here(
    cfg: Config, target: Target, texts: Sequence[Document | Prompt]
) -> list[RoundCosts]:
    """The costs of rounds on this machine at each batch size, with a draft that is not trained:
    what it proposes does not matter."""
    if cfg.family.copies:
        return []
    documents = [Document(t.id, t.ids, np.ones(len(t.ids), np.bool_)) for t in texts]
    try:
        drafter = initial_drafter(StageConfig(), cfg.drafter, target, documents, 0).to(target.dtype)
    except UserError as error:
        console.print(f"the gain is not measured: {first_line(error)}")
        return []
    drafter.eval()
    prompt = np.resize(texts[0].ids, LENGTH).tolist()
    gammas = sorted({1, cfg.decode.gamma or drafter.depth})
    rounds = []
    for batch, turns in TURNS.items():
        setup = Setup(target, batch=batch)
        each = {g: costs(setup, Way(drafter, Chain(g)), prompt, turns) for g in gammas}
        # a pass over more tokens is not shorter: what says so is the noise of another program
        v = pass_cost({g: max(1.0, cost.v.value) for g, cost in each.items()})
        c, parallel = each[gammas[-1]].c.value, drafter.limits.parallel
        c = c * gammas[-1] if parallel else c
        rounds.append(RoundCosts(batch, c, v, parallel))
    return rounds


def _free_disk(cfg: Config) -> float:
    """The bytes that are free where the features, the largest files, will be."""
    folder = Path(cfg.features.path or cfg.features.root).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return float(shutil.disk_usage(there).free)


def _of_gain(gain: Gain, alpha: float) -> str:
    if gain.break_even is None:
        return f"batch {gain.batch}: no draft of this kind pays, however often it is accepted"
    least = (
        f"batch {gain.batch}: pays if more than {gain.break_even:.2f} of the drafts are accepted"
    )
    if not gain.pays:
        return f"{least}; at α = {alpha:g} it does not"
    size = "1 token" if gain.gamma == 1 else f"{gain.gamma} tokens"
    return f"{least}; at α = {alpha:g}, chains of {size} are {gain.speedup:.2f} times as fast"


def _count(number: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:,.1f} {letter}"
    return str(number)


def hours(seconds: float) -> str:
    """A time in hours, or in minutes if it is short."""
    return minutes(seconds) if seconds < 5400 else f"{seconds / 3600:,.1f} hours"

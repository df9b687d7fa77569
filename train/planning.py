"""`plan=true`: the memory and time that a run needs, its cost, and the gain of a draft, before
anything is loaded or trained.

Everything follows from one table of bytes (`stages_of`) and one cost of a forward pass
(`forward_seconds`). On this machine, steps of the target and of training are measured first; other
devices are estimates from their data sheets. `remedies` are settings that were tried in the same
table.
"""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from accelerate import PartialState

from specdec.decoding import fitting
from specdec.errors import UserError, require
from specdec.files import make_folder
from specdec.measure.calibration import CALIBRATING
from specdec.measure.choosing import LEARNING, steps_of_a_choice
from specdec.measure.evaluation import LEAST_PROMPTS
from specdec.measure.results import CutResponses
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
from specdec.theory.leviathan import PassCost, best_gamma, walltime_by_gamma
from train.accelerated import accelerator_of
from train.budget import FORWARD, MEASURING, TEXTS, TRAINING
from train.data.lengths import DataLengths
from train.data.rendering import own_chat_template, prompt_rendering
from train.data.response_files import cut_responses_in_cache
from train.data.run_data import DataCounts
from train.data.sequences import Document, Prompt
from train.data.sources import files_of
from train.data.split import SHARE, DataSplit, parts_of
from train.hidden_states.store import SCALE, block_size
from train.initialisation import earlier_drafts, stride
from train.machine_timing import timed_device, timed_speculation, timed_training
from train.run_config import Config
from train.run_documents import split_of_run
from train.sizes import (
    DEVICES,
    GIB,
    Device,
    DraftFootprint,
    TargetSizes,
    device_here,
    draft_sizes,
    sizes_of_target,
)
from train.target_defaults import tokenizer_of, with_target_defaults

ROOM = 0.9  # planned fraction of a device's memory; the rest is the runtime's
FULL = 4  # bytes of a number in float32
HELD = 4  # float32 tensors over the draft's vocabulary that a chunk of anchors holds
KEPT = 1.5  # memory kept by a training step, relative to its products' inputs and outputs
CHECKPOINTS = 3  # on disk while a new one is written
SAID = 0.9  # share of responses.max_new_tokens that responses took up in quickstarts
ALONG = 1.7  # counting acceptance along a text takes as many times only reading it
AFTER = 30.0  # seconds for imports, checkpoints, report and export
SEVERAL = 0.85  # efficiency of several devices for one target
GRAPH = 2e-5  # seconds that a layer takes to start in an engine, which replays a graph
CONTEXT = 1024  # tokens of a sequence that is being decoded when a draft's gain is worked out
BATCHES = (1, 8, 32, 128)  # for which a draft's gain is worked out
PAYS = 1.02  # the least speedup that counts as one
LONGEST = 8  # tokens of the longest chain that is considered
MOST_DEVICES = 64  # maximum number of devices in a remedy
SAMPLED = 400  # conversations that are read if planning.tokens says how many there are
ASSUMED = 20_000_000  # tokens of the training texts, if there is no tokenizer to count them with
ENGINES = ["http://localhost:8000/v1"]  # in remedies
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")

Settings = Mapping[str, Any]  # values by key, such as {"loop.rows": 2}


@dataclass(frozen=True)
class DataAmount:
    """The amount of data of a run: conversations to train on, with their number of `tokens` before
    the target responds, validation conversations and test prompts; how it is `known`; and all of
    the data, unless `planning.tokens` is given."""

    conversations: int
    tokens: int
    validation: int
    prompts: int
    prompt: float  # mean number of tokens of a prompt
    known: str
    split: DataSplit[Any] | None = None
    lengths: Sequence[str] = ()  # lengths of its prompts and documents, in words


class PlannedStage(NamedTuple):
    """A stage of a run, or the disk: the bytes that it needs on each device, by purpose; the
    available bytes; and its seconds."""

    name: str
    filled: dict[str, float]
    room: float
    seconds: float = 0.0

    @property
    def bytes(self) -> float:
        return sum(self.filled.values())

    @property
    def fits(self) -> bool:
        return self.bytes <= self.room


class PredictedGain(NamedTuple):
    """The gain of a draft at a batch size: the break-even α, above which some chain gains (None:
    never), and the best γ and speedup at the expected α (γ = 0: vanilla decoding)."""

    batch: int
    break_even: float | None
    gamma: int
    speedup: float


@dataclass(frozen=True)
class Facts:
    """The inputs of a plan, besides the configuration. `costs` are c, and v by γ, for each batch
    size; `free` are the free bytes on the disk of this machine, and `merged` those of the copy
    with `target.adapter` merged into it."""

    target: TargetSizes
    draft: DraftFootprint | None
    device: Device
    data: DataAmount
    costs: dict[int, tuple[float, PassCost]]
    free: float = math.inf
    merged: float = 0.0
    measured: bool = False  # whether the target and the draft were timed on this machine
    cut: CutResponses | None = None  # counts of cut responses of earlier runs
    decided: Sequence[str] = ()  # notes on settings that the target decided


def stages_of(cfg: Config, facts: Facts) -> list[PlannedStage]:
    """The table: the stages of a run on `planning.devices` devices, and the disk. A batch shrinks
    to the free memory, as it does in a run."""
    target, draft, data, n = facts.target, facts.draft, facts.data, cfg.planning.devices
    room, state, new = ROOM * facts.device.memory, target.state, cfg.responses.longest_response
    # devices that hold one target, those of them that compute at the same time, and processes
    parts, together, processes, weights = 1, 1, n, target.bytes
    if cfg.target.tensor_parallel:
        parts, together, weights = n, n, target.held(n)
    elif cfg.target.device_map is not None and n > 1:  # whole layers, one after another
        layer = (target.bytes - target.parts_bytes) / target.layers
        parts, processes, weights = n, 1, target.bytes / n + layer
    copies = n // parts
    responds = cfg.data.responses == "target"
    texts = data.conversations + data.validation
    longest = cfg.data.longest_prompt if responds else cfg.data.longest_document
    mean = min(data.tokens / data.conversations, longest) + (SAID * new if responds else 0)
    prompt = min(data.prompt, cfg.data.longest_prompt)
    states = target.width * state * (1 + (draft.stored if draft else 0))  # bytes of a token

    def seconds(rows: int, tokens: int, context: float) -> float:
        launch = facts.device.launch
        return forward_seconds(target, facts.device, rows, tokens, context, together, launch)

    def decoding(
        held: dict[str, float], asked: int, least: int, new: int, kept: bool, drafts: bool = False
    ) -> tuple[int, dict[str, float]]:
        """The number of rows decoded together, with `new` tokens each, and the bytes that they
        need."""
        row = {
            "KV cache": fitting.GROWTH * target.cached * (cfg.data.longest_prompt + new) / parts,
            "activations": fitting.ACTIVATIONS * target.width * state * cfg.data.longest_prompt,
            "logits": fitting.LOGITS * FULL * target.vocab,
            "hidden states": kept * fitting.GROWTH * states * (cfg.data.longest_prompt + new),
        }
        if draft and drafts and draft.cached:
            of_draft = draft.held(cfg.data.longest_prompt + new)
            row["KV cache of the draft"] = fitting.GROWTH * of_draft * state
        fit = int(fitting.SHARE * (room - sum(held.values())) / sum(row.values()))
        rows = max(least, min(asked, fit))
        return rows, held | {name: rows * size for name, size in row.items()}

    held, stages = {"target weights": weights}, list[PlannedStage]()
    reading = seconds(1, cfg.data.longest_document, 0) / cfg.data.longest_document
    # hidden states, while the target responds
    kept = responds and cfg.responses_bring_hidden_states
    if responds and not cfg.response_generation.engines:
        rows, filled = decoding(held, cfg.responses.at_once(facts.device.gpu), 1, new, kept)
        step = seconds(rows, 1, prompt + new / 2) / rows
        time = texts * (SAID * new * step + prompt * reading) / copies
        stages.append(PlannedStage("responses", filled, room, time))
    if cfg.stores_hidden_states and not cfg.hidden_states.engines:
        filled = held | {
            "activations": fitting.ACTIVATIONS * target.width * state * cfg.data.longest_document,
            "logits": fitting.LOGITS * FULL * target.vocab * 128,
            "hidden states": states * cfg.data.longest_document,
        }
        time = 0.0 if kept else texts * mean * reading / copies
        stages.append(PlannedStage("hidden states", filled, room, time))
    if cfg.trains and draft is not None:
        # then the target runs in training
        layers = cfg.needs_layers or not cfg.stores_hidden_states
        filled = _filled_by_training(cfg, target, draft, weights if layers else target.parts_bytes)
        operations = _operations_of_training(cfg, target, draft)
        time = operations * _tokens_of_training(cfg, draft, data, mean)
        time /= (facts.device.training or facts.device.rate) * processes
        stages.append(PlannedStage("training", filled, room, time))
    if cfg.decode.prompts:
        held |= {"draft weights": draft.weights * state if draft else 0.0}
        new, batch = cfg.decode.max_new_tokens, cfg.decode.batch
        rows, filled = decoding(held, cfg.decode.counting, batch, new, True, drafts=True)
        asked = min(cfg.decode.prompts, data.prompts)
        timed, ways = (
            min(asked, cfg.decode.timed_prompts),
            1 + cfg.decode.fastest + bool(cfg.combine_with),
        )
        single, many = (seconds(b, 1, prompt + new / 2) / b for b in (batch, rows))
        gamma = cfg.decode.gamma or (draft.depth if draft else 1)
        learned = LEARNING * new + cfg.decode.fastest * steps_of_a_choice(cfg.decode, gamma)
        tokens = (1 + ways) * timed * cfg.decode.repeats * new + learned
        counted = (asked - timed + CALIBRATING) * (1 + ways) * new
        read = (asked + CALIBRATING) * ((1 + ways) * prompt + 2 * ALONG * (prompt + new))
        time = tokens * single + counted * many + read * reading
        time = AFTER + len(cfg.decode.temperatures) * time
        stages.append(PlannedStage("measuring", filled, room, time))
    if cfg.budget.minutes is not None:
        stages = _by_the_clock(
            60 * cfg.budget.minutes, stages, min(cfg.decode.prompts, data.prompts)
        )
    disk = _disk(cfg, target, draft, texts * mean)
    if facts.merged:
        disk["merged target"] = facts.merged
    return [*stages, PlannedStage("disk", disk, facts.free)]


def _by_the_clock(
    seconds: float, stages: Sequence[PlannedStage], prompts: int
) -> list[PlannedStage]:
    """The stages with the times that `budget.minutes` leaves them, for `prompts` measured prompts:
    training stops after a number of steps, and measuring after a number of prompts."""
    times = {stage.name: stage.seconds for stage in stages}
    if (measuring := times.get("measuring")) is not None:
        least = measuring * min(1.0, LEAST_PROMPTS / max(1, prompts))
        times["measuring"] = min(measuring, max(MEASURING * seconds, least))
    if (training := times.pop("training", None)) is not None:
        times["training"] = min(training, max(TRAINING * seconds, seconds - sum(times.values())))
    return [stage._replace(seconds=times[stage.name]) for stage in stages]


def _filled_by_training(
    cfg: Config, target: TargetSizes, draft: DraftFootprint, frozen: float
) -> dict[str, float]:
    """The bytes of a training step on a device, by purpose. FSDP2 divides the tensors that last
    between steps; in a step, it gathers all of the draft's weights, as one unit, and the gradients
    are complete before they are divided."""
    alone = not cfg.planning.fsdp or cfg.target.device_map is not None
    shards = 1 if alone else cfg.planning.devices
    share = draft.trained / shards if shards > 1 else 0  # beside the complete weights and gradients
    products = min(target.state, FULL)  # bytes of a number that is multiplied
    cast = products * draft.trained * (products < FULL)
    positions = cfg.loop.rows * cfg.data.longest_document
    anchors = min(positions, cfg.loop.rows * (draft.anchors or positions))
    chunk = min(cfg.loss.chunk, anchors)
    return {
        "target weights": frozen,
        "draft weights": FULL * (draft.weights + share) + cast,
        "gradients and optimizer": FULL * (draft.trained + share + draft.moments / shards),
        "activations": KEPT * anchors * draft.depth * draft.linear * products,
        "logits": chunk * FULL * (HELD * draft.depth * draft.head + 3 * target.vocab),
        "hidden states": 2 * positions * target.width * (1 + draft.stored) * target.state,
    }


def _operations_of_training(cfg: Config, target: TargetSizes, draft: DraftFootprint) -> float:
    """Operations per token: a forward and a backward pass of the draft at every depth, the target's
    own distribution, and the target's layers if they run in training."""
    anchors = min(1.0, (draft.anchors or cfg.data.longest_document) / cfg.data.longest_document)
    online = cfg.needs_layers or not cfg.stores_hidden_states
    return 6 * draft.read * draft.depth * anchors + 2 * (target.active if online else target.head)


def _tokens_of_training(cfg: Config, draft: DraftFootprint, data: DataAmount, mean: float) -> float:
    """Tokens of all training steps, and of held-out evaluations and a closed-form initialisation,
    which need a forward pass only. Conversations have `mean` tokens."""
    once = data.conversations * mean
    tokens = min(once * cfg.loop.epochs * cfg.rounds.count, cfg.loop.max_tokens or math.inf)
    step = cfg.loop.rows * cfg.loop.accumulate * cfg.planning.devices * cfg.data.longest_document
    evaluations = 1 + (tokens / step / cfg.loop.eval_every if cfg.loop.eval_every else 0)
    solved = once / stride(int(once)) if draft.solved and cfg.initialisation.draft is None else 0
    return tokens + FORWARD * (evaluations * data.validation * mean + solved)


def _disk(
    cfg: Config, target: TargetSizes, draft: DraftFootprint | None, tokens: float
) -> dict[str, float]:
    """The bytes that a run over `tokens` tokens writes, by purpose."""
    sizes: dict[str, float] = {}
    if draft is not None and cfg.stores_hidden_states:
        number = (
            1 + SCALE.itemsize / block_size(target.width)
            if cfg.hidden_states.bits
            else target.state
        )
        states = target.width * (target.state + draft.stored * number)
        sizes["hidden states"] = tokens * (states + 12 + 4 * cfg.sampler.truncates)
    if cfg.data.responses == "target":
        sizes["responses"] = 8 * tokens
    if draft is not None and cfg.trains:
        kept = CHECKPOINTS * (draft.trained + draft.moments) + 2 * draft.weights
        sizes["checkpoints"] = FULL * kept
    return sizes


def forward_seconds(
    target: TargetSizes,
    device: Device,
    rows: int,
    tokens: int,
    context: float,
    together: int = 1,
    launch: float = 0.0,
) -> float:
    """Seconds of a forward pass over `tokens` tokens of `rows` rows, on `together` devices: the
    time for reading weights and caches plus the time of the products. They are added, so each
    verified token has a cost (docs/gpus.md compares this with measured passes)."""
    speed = 1 + SEVERAL * (together - 1)
    moved = target.bytes_read(rows * tokens) + rows * context * target.cached
    operations = 2 * target.active * rows * tokens
    return (moved / device.bandwidth + operations / device.rate) / speed + launch * target.layers


def speculation_costs(
    target: TargetSizes, draft: DraftFootprint, device: Device, batch: int
) -> tuple[float, PassCost]:
    """c, and v by γ, in vanilla steps at this batch size, in an engine that replays graphs on as
    many devices as hold the target. The one step of a parallel draft is a part of v."""
    together, launch = devices_for(target, device), GRAPH if device.gpu else 0.0
    speed, width = 1 + SEVERAL * (together - 1), draft.depth if draft.parallel else 1

    def checked(gamma: int) -> float:
        return forward_seconds(target, device, batch, 1 + gamma, CONTEXT, together, launch)

    cached = batch * draft.held(CONTEXT)  # numbers of its KV cache that a step reads
    moving = (draft.read + cached) * target.state / device.bandwidth
    computing = 2 * draft.read * batch * width / device.rate
    drafted = ((moving + computing) / speed + 2 * launch) / checked(0)
    if draft.parallel:
        return 0.0, lambda gamma: drafted + checked(gamma) / checked(0)
    return drafted, lambda gamma: checked(gamma) / checked(0)


def devices_for(target: TargetSizes, device: Device) -> int:
    """The number of devices that hold the target, with room for a sequence."""
    return max(1, math.ceil(1.1 * target.bytes / (ROOM * device.memory)))


def gain(batch: int, alpha: float, c: float, v: PassCost) -> PredictedGain:
    """The gain of a draft with acceptance `alpha`. A higher acceptance is never slower, so the
    break-even α is found by bisection, to a thousandth."""
    gamma, low, high = best_gamma(alpha, c, LONGEST, v), 0.0, 1.0
    while high - low > 0.001:
        middle = (low + high) / 2
        low, high = (low, middle) if best_gamma(middle, c, LONGEST, v) else (middle, high)
    pays = best_gamma(1.0, c, LONGEST, v) > 0
    speedup = walltime_by_gamma(alpha, c, LONGEST, v)[gamma]
    return PredictedGain(batch, high if pays else None, gamma, speedup)


def with_settings(cfg: Config, settings: Settings) -> Config:
    """The configuration with other values of these keys, as set on the command line. Raises
    UserError for contradictory values."""
    for key, value in settings.items():
        group, name = key.split(".")
        owner = replace(getattr(cfg, group), **{"engines" if name == "from" else name: value})
        cfg = replace(cfg, **{group: owner})
    cfg.check()
    require(
        not (cfg.target.tensor_parallel and cfg.target.device_map),
        "target.tensor_parallel and target.device_map exclude each other",
    )
    return cfg


def as_overrides(settings: Settings) -> str:
    """Settings as arguments of train.py."""
    texts = {key: x[0] if isinstance(x, list) else x for key, x in settings.items()}
    return " ".join(
        f"{key}={str(x).lower() if isinstance(x, bool) else x}" for key, x in texts.items()
    )


def remedies(cfg: Config, facts: Facts, name: str) -> list[Settings]:
    """Settings with which the stage of this name fits, and no other stage stops fitting: the least
    change of each kind, and none that contains the keys of another."""
    unfit = {stage.name for stage in stages_of(cfg, facts) if not stage.fits}

    def fits(settings: Settings) -> bool:
        try:
            stages = stages_of(with_settings(cfg, settings), facts)
        except UserError:  # they do not go with the others
            return False
        return {stage.name for stage in stages if not stage.fits} <= unfit - {name}

    fitted = list[Settings]()
    for kind in _candidates(cfg, facts, name):
        kind = [x for x in kind if not any(x.keys() >= known.keys() for known in fitted)]
        fitted += [settings for settings in kind if fits(settings)][:1]
    return fitted


def _candidates(cfg: Config, facts: Facts, name: str) -> Iterator[list[Settings]]:
    """Settings to try for a stage, by kind, the least change first. More devices are proposed only
    if they are GPUs."""
    n, rows, target = cfg.planning.devices, cfg.loop.rows, facts.target
    larger = [2**k for k in range(1, 10) if n < 2**k <= MOST_DEVICES and facts.device.gpu]

    def halves(key: str, value: int, least: int) -> list[Settings]:
        return [{key: value >> k} for k in range(1, 32) if value >> k >= least]

    def shorter() -> list[Settings]:
        """Shorter documents, with prompts and responses that have room in them."""
        lengths = halves("data.max_length", cfg.data.longest_document, 64)
        if cfg.data.responses != "target":
            return lengths
        prompt, new = cfg.data.longest_prompt, cfg.responses.longest_response
        return [
            {
                **length,
                "data.max_prompt": min(prompt, most // 2),
                "responses.max_new_tokens": min(new, most // 2),
            }
            for length in lengths
            for most in length.values()
        ]

    if name == "disk":
        yield [{"hidden_states.bits": 8}]
        yield [{"hidden_states.mode": "online"}]
        return
    smaller: list[Settings] = [{}]  # training steps that hold less, but read as many rows
    if name == "training":
        fewer: list[Settings] = [
            {"loop.rows": r, "loop.accumulate": cfg.loop.accumulate * rows // r}
            for r in range(rows - 1, 0, -1)
            if rows % r == 0
        ]
        chunks = halves("loss.chunk", cfg.loss.chunk, 32)
        yield fewer
        yield chunks
        yield [{**r, **c} for r in fewer for c in chunks]
        smaller += [{**r, **c} for r in fewer[-1:] or [{}] for c in chunks[-1:]]
        yield [{"hidden_states.mode": "offline", **s} for s in smaller]
        yield [{"planning.fsdp": True, **s} for s in smaller if n > 1]
        yield [{"planning.devices": m, "planning.fsdp": True, **s} for m in larger for s in smaller]
        yield [{**smaller[-1], **s} for s in shorter()]
    ways: list[Settings] = [{"target.tensor_parallel": True}, {"target.device_map": "auto"}]
    for way in [{}] if cfg.target.tensor_parallel or cfg.target.device_map else ways:
        divides = cfg.target.tensor_parallel or "target.tensor_parallel" in way
        counts = [m for m in (n, *larger) if m > 1 and (target.divides(m) or not divides)]
        yield [{**way, **s} for m in counts if m == n for s in smaller]
        part = target.most_processes(n) if divides else n  # of the devices
        if part is not None and part != n:
            yield [{"planning.devices": part, **way, **s} for s in smaller]
        yield [{"planning.devices": m, **way, **s} for m in counts if m > n for s in smaller]
    if name in ("responses", "hidden states"):
        if name == "responses":
            yield [{"responses.from": ENGINES}]
            yield halves("responses.max_new_tokens", cfg.responses.longest_response, 16)
        yield [{"hidden_states.from": ENGINES}]
        yield shorter()
    if name == "measuring":
        yield halves("decode.batch", cfg.decode.batch, 1)
        yield [{"decode.prompts": 0}]


def fitting_settings(cfg: Config, facts: Facts, more: bool = False) -> Settings | None:
    """Settings with which all stages fit, on `more` devices if given; None if there are none. They
    are found step by step: the remedy of a stage after which the fewest stages do not fit."""
    settings: Settings = {}
    while True:
        now = with_settings(cfg, settings)
        unfit = [stage.name for stage in stages_of(now, facts) if not stage.fits]
        if not unfit:
            return settings
        options = [{**settings, **option} for option in remedies(now, facts, unfit[0])]
        if not more:
            options = [x for x in options if x.get("planning.devices", 0) <= cfg.planning.devices]
        if not options:
            return None
        settings = min(options, key=lambda option: _unfit(with_settings(cfg, option), facts))


def _unfit(cfg: Config, facts: Facts) -> int:
    return sum(not stage.fits for stage in stages_of(cfg, facts))


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
                f"{min(LEAST_PROMPTS, self.facts.data.prompts)} measured prompts, the least that a "
                f"run does, take {hours(self.seconds)}: give "
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
            operations = tokens * _operations_of_training(cfg, sizes, draft)
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

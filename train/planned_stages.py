"""The table of a plan: the bytes and the seconds of each stage of a run (`stages_of`), from the
cost of a forward pass (`forward_seconds`), and the gain of a draft."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec.decoding import fitting
from specdec.measure.calibration import CALIBRATING
from specdec.measure.choosing import LEARNING, steps_of_a_choice
from specdec.measure.decoded_prompts import FEWEST_PROMPTS
from specdec.measure.results import CutResponses
from specdec.theory.leviathan import PassCost, best_gamma, walltime_by_gamma
from train.budget import FORWARD, MEASURING, TRAINING
from train.data.split import DataSplit
from train.hidden_states.store import SCALE, block_size
from train.initialisation import stride
from train.run_config import Config
from train.sizes import (
    Device,
    DraftFootprint,
    TargetSizes,
)

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
LONGEST = 8  # tokens of the longest chain that is considered


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
    stored = data.validation if cfg.trains_on_text_alone else texts  # those that have hidden states
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
    if cfg.stores_held_out and not cfg.hidden_states.engines:
        filled = held | {
            "activations": fitting.ACTIVATIONS * target.width * state * cfg.data.longest_document,
            "logits": fitting.LOGITS * FULL * target.vocab * 128,
            "hidden states": states * cfg.data.longest_document,
        }
        time = 0.0 if kept else stored * mean * reading / copies
        stages.append(PlannedStage("hidden states", filled, room, time))
    if cfg.trains and draft is not None:
        # then the target runs in training
        layers = cfg.needs_layers or not cfg.stores_held_out
        filled = _filled_by_training(cfg, target, draft, weights if layers else target.parts_bytes)
        operations = operations_of_training(cfg, target, draft)
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
    disk = _disk(cfg, target, draft, texts * mean, stored * mean)
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
        least = measuring * min(1.0, FEWEST_PROMPTS / max(1, prompts))
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
    of_target = 0 if cfg.trains_on_text_alone else 3 * target.vocab  # p
    return {
        "target weights": frozen,
        "draft weights": FULL * (draft.weights + share) + cast,
        "gradients and optimizer": FULL * (draft.trained + share + draft.moments / shards),
        "activations": KEPT * anchors * draft.depth * draft.linear * products,
        "logits": chunk * FULL * (HELD * draft.depth * draft.head + of_target),
        "hidden states": 2 * positions * target.width * (1 + draft.stored) * target.state,
    }


def operations_of_training(cfg: Config, target: TargetSizes, draft: DraftFootprint) -> float:
    """Operations per token: a forward and a backward pass of the draft at every depth, the target's
    own distribution, and the target's layers if they run in training."""
    anchors = min(1.0, (draft.anchors or cfg.data.longest_document) / cfg.data.longest_document)
    online = cfg.needs_layers or not cfg.stores_hidden_states
    of_target = 0 if cfg.trains_on_text_alone else 2 * (target.active if online else target.head)
    return 6 * draft.read * draft.depth * anchors + of_target


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
    cfg: Config, target: TargetSizes, draft: DraftFootprint | None, tokens: float, stored: float
) -> dict[str, float]:
    """The bytes that a run over `tokens` tokens writes, by purpose; `stored` is the number of those
    with hidden states."""
    sizes: dict[str, float] = {}
    if draft is not None and cfg.stores_held_out:
        number = (
            1 + SCALE.itemsize / block_size(target.width)
            if cfg.hidden_states.bits
            else target.state
        )
        states = target.width * (target.state + draft.stored * number)
        sizes["hidden states"] = stored * (states + 12 + 4 * cfg.sampler.truncates)
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

"""What a run needs of devices and disk, stage by stage, by arithmetic on the sizes of target and
draft; and the settings that would fit where a stage does not."""

import math
from dataclasses import dataclass, replace

from specdec.decoding.fitting import ACTIVATIONS, GROWTH, LOGITS, SHARE
from specdec.sampling.trees import DEEPEST
from train.budget_plan import Speeds
from train.hidden_states.store import SCALE, block_size
from train.planning.devices import GIB, Device
from train.planning.gain import RoundCosts
from train.planning.outline import FULL, DraftOutline, Outline
from train.run_config import Config

ROOM = 0.9  # of a device's memory that is planned; the rest is the runtime's own
STATES = 4  # float32 numbers of a trained weight: itself, its gradient, two moments
HELD = 4  # float32 tensors over the draft's vocabulary that a chunk of anchors holds
KEPT = 1.5  # what a training pass keeps, relative to what its products read and write
SEVERAL = 0.85  # of the added speed that several devices give to one model
PYTHON = 3e-4  # seconds that a layer takes on a GPU when Python starts its kernels one by one
GRAPH = 2e-5  # the same in an engine, which replays a graph
CONTEXT = 1024  # tokens of a text that is being decoded when a draft's gain is worked out
CHECKPOINTS = 3  # on disk while a new one is written
ENTRY = 8  # bytes of a token in a file of answers


@dataclass(frozen=True)
class Stage:
    """What a stage needs on each device in bytes, and what to do if that is more than there is."""

    name: str
    bytes: float
    room: float
    remedy: str = ""

    @property
    def fits(self) -> bool:
        return self.bytes <= self.room


def devices_for(target: Outline, device: Device) -> int:
    """How many devices hold the target, with room for a text."""
    return max(1, math.ceil(1.1 * target.bytes / (ROOM * device.memory)))


def stages(
    cfg: Config, target: Outline, draft: DraftOutline | None, device: Device, devices: int
) -> list[Stage]:
    """The stages of a run and their memory on each of so many devices, each of which holds a copy
    of what a stage needs, or its part of the target with `target.tensor_parallel`."""
    room, new = ROOM * device.memory, cfg.answers.max_new_tokens
    together = devices if cfg.target.tensor_parallel else 1
    weights = target.held(together)
    whole, listed = _whole(target, device, devices), []
    if cfg.data.answers == "target" and not cfg.answering.engines:
        row = _row(target, cfg.data.max_prompt, new, together)
        fitting = int((SHARE * device.memory - weights) / row)
        rows = max(1, min(cfg.answers.at_once(device.gpu), fitting))
        remedy = f"answers.from=URL lets an engine answer; {whole}" if weights > room else whole
        listed.append(Stage("answers", weights + rows * row, room, remedy))
    if cfg.stores_features and not cfg.features.engines:
        read = ACTIVATIONS * target.width * target.state * cfg.data.max_length
        logits = LOGITS * 4 * target.vocab * 128
        listed.append(Stage("features", weights + read + logits, room, whole))
    if cfg.trains and draft is not None:
        needed = training_bytes(cfg, target, draft)
        remedy = _smaller(cfg, target, draft, room, devices, whole)
        listed.append(Stage("training", needed, room, remedy))
    held = 0.0 if draft is None else draft.weights * target.state
    row = _row(target, cfg.data.max_prompt, cfg.decode.max_new_tokens, together)
    rows = max(cfg.decode.batch, min(cfg.decode.counting, cfg.decode.prompts))
    listed.append(Stage("measuring", weights + held + rows * row, room, whole))
    return listed


def training_bytes(cfg: Config, target: Outline, draft: DraftOutline, shards: int = 1) -> float:
    """Memory of training on a device: the target's embedding and head (or all of it, if its layers
    run in training), the draft's weights, gradients and moments (their share, if `shards` devices
    split them), what a pass keeps for its gradients, and a chunk's logits."""
    layers = cfg.needs_layers or cfg.features.cache == "online"
    frozen = target.bytes if layers else target.parts_bytes
    states = STATES * FULL * draft.trained / shards + FULL * (draft.weights - draft.trained)
    positions, depth = cfg.loop.rows * cfg.data.max_length, draft.depth
    compute = 2 if target.state == 2 else FULL
    sampled = getattr(getattr(cfg.drafter, "anchors", None), "per_row", None)
    anchors = min(positions, cfg.loop.rows * sampled) if sampled else positions
    kept = KEPT * anchors * depth * draft.linear * compute
    read = 2 * positions * target.width * (1 + draft.stored) * target.state
    chunk = min(cfg.objective.chunk, anchors)
    logits = chunk * FULL * (HELD * depth * draft.head + 3 * target.vocab)
    return frozen + states + kept + read + logits


def _row(target: Outline, prompt: int, new: int, together: int = 1) -> float:
    """Memory of a row of a batch that is being answered, as `rows_that_fit` counts it, in each of
    so many processes that hold the target together."""
    kept = target.cached * (prompt + new) * GROWTH / together
    return kept + LOGITS * 4 * target.vocab + ACTIVATIONS * target.width * target.state * prompt


def _whole(target: Outline, device: Device, devices: int) -> str:
    """What to do if the whole target does not fit on one device."""
    needed = devices_for(target, device)
    if needed == 1:
        return "lower data.max_length, answers.batch or decode.counting"
    if target.divides(devices) and 1.1 * target.held(devices) <= ROOM * device.memory:
        return f"target.tensor_parallel=true lets {devices} processes hold the target together"
    if needed <= devices:
        return f"target.device_map=auto spreads the target over {needed} devices"
    eight = replace(target, itemsize=target.itemsize / 2)
    less = devices_for(eight, device)
    of_less = f", or {less} for a checkpoint of half the size (8 bits)" if less < needed else ""
    return f"{needed} such devices hold the target{of_less}"


def _smaller(
    cfg: Config, target: Outline, draft: DraftOutline, room: float, devices: int, whole: str
) -> str:
    """The settings with which training fits, the least change first."""
    layers = cfg.needs_layers or cfg.features.cache == "online"
    if layers and target.bytes > room:
        return whole if cfg.needs_layers else "give features.cache=disk"
    chunk = min(64, cfg.objective.chunk)
    for rows in range(cfg.loop.rows, 0, -1):
        fewer = replace(
            cfg,
            loop=replace(cfg.loop, rows=rows),
            objective=replace(cfg.objective, chunk=chunk),
        )
        for shards in dict.fromkeys((1, devices)):
            if training_bytes(fewer, target, draft, shards) <= room:
                by = f"loop.rows={rows} objective.chunk={chunk}"
                sharded = f", sharded by FSDP2 over {shards} processes"
                return f"give {by}{sharded if shards > 1 else ''}"
    length = cfg.data.max_length
    return f"lower data.max_length={length}, or give a smaller draft or more devices"


def disk_bytes(
    cfg: Config, target: Outline, draft: DraftOutline | None, tokens: float
) -> dict[str, float]:
    """The size on disk of what a run over so many tokens writes, by what it is."""
    sizes: dict[str, float] = {}
    if cfg.data.answers == "target":
        sizes["answers"] = ENTRY * tokens
    if draft is not None and cfg.stores_features:
        of_number = float(target.state)
        if cfg.features.bits is not None:
            of_number = 1 + SCALE.itemsize / block_size(target.width)
        states = target.width * (target.state + draft.stored * of_number)
        sizes["features"] = tokens * (states + 12 + 4 * cfg.sampler.truncates)
    if draft is not None and cfg.trains:
        sizes["checkpoints and drafts"] = FULL * (
            CHECKPOINTS * 3 * draft.trained + 2 * draft.weights
        )
    return sizes


def pass_seconds(
    target: Outline,
    device: Device,
    rows: int,
    tokens: int,
    context: int,
    together: int = 1,
    launch: float = 0.0,
) -> float:
    """Seconds of a pass over so many tokens of so many rows, on devices that hold the target
    `together`: the longer of reading weights and caches, and of the products."""
    speed = 1 + SEVERAL * (together - 1)
    moved = target.bytes_read(rows * tokens) + rows * context * target.cached
    moving = moved / (device.streamed * device.bandwidth * speed)
    computing = 2 * target.active * rows * tokens / (device.achieved * device.rate * speed)
    return max(moving, computing) + launch * target.layers


def speeds_of(
    cfg: Config, target: Outline, draft: DraftOutline | None, device: Device, devices: int
) -> Speeds:
    """The speeds of so many devices by arithmetic: of all of them together, but for `step`."""
    together = devices if cfg.target.tensor_parallel else devices_for(target, device)
    copies = max(1, devices // together)
    launch = PYTHON if device.gpu else 0.0
    context = cfg.data.max_prompt + cfg.answers.max_new_tokens // 2
    batch = min(cfg.answers.at_once(device.gpu), cfg.decode.counting)
    if cfg.data.answers == "target":
        batch = cfg.answers.at_once(device.gpu)
    steps = [pass_seconds(target, device, n, 1, context, together, launch) for n in (1, batch)]
    length = cfg.data.max_length
    reading = pass_seconds(target, device, 1, length, 0, together, launch) / length
    return Speeds(
        read=reading / copies,
        answered=steps[1] / batch / copies,
        step=steps[0],
        trained=_trained(target, draft, device) / devices if draft is not None else 0.0,
    )


def _trained(target: Outline, draft: DraftOutline, device: Device) -> float:
    """Seconds of training on a token: a forward and a backward pass of the draft at every depth,
    and the target's own distribution."""
    per_depth = 6 * draft.read
    return (per_depth * draft.depth + 2 * target.head) / (device.achieved * device.rate)


def round_costs(target: Outline, draft: DraftOutline, device: Device, batch: int) -> RoundCosts:
    """The costs of a round at this batch size by arithmetic, as an engine has them that replays
    graphs; the target is spread over as many devices as hold it."""
    together, launch = devices_for(target, device), GRAPH if device.gpu else 0.0
    step = pass_seconds(target, device, batch, 1, CONTEXT, together, launch)
    speed = 1 + SEVERAL * (together - 1)
    bytes_read = draft.read * target.state
    moving = bytes_read / (device.streamed * device.bandwidth * speed)
    width = draft.depth if draft.parallel else 1
    computing = 2 * draft.read * batch * width / (device.achieved * device.rate * speed)
    drafting = max(moving, computing) + (2 * launch)
    by_gamma = {
        gamma: pass_seconds(target, device, batch, 1 + gamma, CONTEXT, together, launch) / step
        for gamma in range(1, DEEPEST + 1)
    }
    return RoundCosts(batch, drafting / step, lambda gamma: by_gamma[gamma], draft.parallel)


def gibibytes(count: float) -> str:
    """A number of bytes in GiB, or in MiB if it is small."""
    return f"{count / GIB:,.1f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:,.0f} MiB"

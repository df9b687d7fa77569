"""How much of a run's data fits `budget.minutes` on this machine.

`timed` times the target's passes and the drafter's training steps for a few seconds, and
`budget_plan.fitted` makes a plan from these speeds. The plan is kept in the run's folder, so that a
resumed run keeps its size.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from specdec.decoding.decode import decode
from specdec.drafters.base import Trainable
from specdec.files import read_record, write_json
from specdec.forcing.teacher import TeacherForcing
from specdec.measure import costs
from specdec.measure.calibration import AT_ONCE, CALIBRATING
from specdec.measure.choosing import LEARNING, steps_of_a_choice
from specdec.progress import console
from specdec.targets.loading import TargetLoader
from specdec.targets.target import Target
from train import optim
from train.accelerated import ranks_of
from train.budget_plan import ALONG, SAID, Plan, Speeds, Work, fitted, minutes
from train.continued import digest_of_settings
from train.data.sequences import Document, Prompt, pack_rows
from train.data.split import DataSplit
from train.folder import PLAN, config_of
from train.held_out import SHARES
from train.hidden_states.batches import OnlineBatches
from train.initialisation import InitialisationConfig, initial_drafter
from train.run_config import Config

# tokens of each timed text if the target answers none, and new tokens timed after a batch of them
TOKENS, NEW = 48, 5
SINGLE = 25  # new tokens timed on a single row, as the final evaluation decodes
TURNS = 2  # timings of the target of which the fastest counts
STEPS = 3  # training steps that are timed, after a warm-up step
POOR = 300  # with fewer training conversations, a head has hardly begun to learn
PLANNED = 0.92  # share of the time left that is planned: stages overran their plan by up to 5 %


def planned(
    cfg: Config,
    folder: Path,
    split: DataSplit[Any],
    target: TargetLoader,
    accelerator: Accelerator,
    started: float,
) -> tuple[int, int]:
    """The numbers of training conversations and of final prompts that fit the budget (all, if there
    is no budget). Prints the numbers and the time that each stage should take. A resumed run keeps
    to the numbers in its plan.json. `started` is the time.monotonic() at which the run began."""
    train, validation, path = split.train, split.validation, folder / PLAN
    remedy = "give another name=, or delete that folder"
    ranks = ranks_of(accelerator, target)
    kept = ranks.first(lambda: read_record(Plan, path, remedy) if path.exists() else None)
    begun, settings = ranks.first(lambda: (bool(config_of(folder)), digest_of_settings(cfg)))
    if kept is not None and not begun and kept.settings not in ("", settings):
        console.print(
            f"{path} was made for other settings, by a run that never began: planning again"
        )
        kept = None
    if kept is not None:
        prompts = min(kept.prompts or cfg.decode.prompts, cfg.decode.prompts)
        console.print(
            f"{path}: {kept.conversations:,} training conversations, as planned before, and "
            f"{prompts} measured prompts"
        )
        return kept.conversations, prompts
    if cfg.budget.minutes is None:
        return len(train), cfg.decode.prompts
    console.print(f"budget: {cfg.budget.minutes:g} minutes; timing this machine for a few seconds")
    generating, whole = cfg.data.responses == "target", target.whole()
    on_gpu = whole.device.type != "cpu"
    batch = cfg.responses.at_once(on_gpu) if generating else cfg.decode.counting
    context = TOKENS  # a text that is being answered has on average half a response so far
    if generating:
        asked = statistics.mean(len(t.ids) for t in train)
        context = round(asked + SAID * cfg.responses.max_new_tokens / 2)

    def here() -> tuple[Speeds, bool]:
        rehearsed, closed_form_initialisation = rehearsal(cfg, whole, train, accelerator)
        return timed(
            whole, [t.ids.tolist() for t in train], batch, rehearsed, context
        ), closed_form_initialisation

    speeds, closed_form_initialisation = here() if ranks.team is None else ranks.first(here)
    closed_form_initialisation = closed_form_initialisation and cfg.initialisation.draft is None
    asked = statistics.mean(len(p.ids) for p in split.prompts) if split.prompts else 0.0
    of_parts = len(split.prompts), len(split.validation_prompts)
    work = work_of(cfg, of_parts, asked, accelerator.num_processes, closed_form_initialisation)
    used = cfg.budget.spent + time.monotonic() - started
    left = PLANNED * (60 * cfg.budget.minutes - used)
    lengths = [[len(t.ids) for t in side] for side in (train, validation)]
    plan = fitted(left, cfg.budget.floor, speeds, work, *lengths)
    plan = broadcast_object_list([plan])[0]  # every process uses the first one's plan
    plan = replace(plan, settings=settings)
    console.print(str(plan))
    if plan.seconds > (room := max(0.0, left / PLANNED)):
        measuring = plan.measuring > plan.seconds / 2
        lower = "decode.max_new_tokens or decode.prompts" if measuring else "budget.floor"
        console.print(
            f"that is more than the {minutes(room)} left of budget.minutes="
            f"{cfg.budget.minutes:g}{', most of it for measuring' * measuring}: give more minutes, "
            f"or lower {lower}"
        )
    if plan.conversations < POOR:
        console.print(
            f"that is fewer than {POOR} conversations: the figures will be poor; "
            f"{_for_more(plan, len(split.held_out), cfg.data.limit)} for better ones"
        )
    if accelerator.is_main_process:
        write_json(path, asdict(plan))
    return plan.conversations, plan.prompts


def work_of(
    cfg: Config,
    prompts: tuple[int, int],
    length: float,
    processes: int,
    closed_form_initialisation: bool,
) -> Work:
    """The work of a run with so many held-out `prompts`, of the test part and of the validation
    part. `length` is the mean number of their tokens; `closed_form_initialisation` says whether the
    run solves for its start."""
    measured = min(cfg.decode.prompts, prompts[0])
    drafted = cfg.decode.max_new_tokens * len(cfg.decode.temperatures)
    ways = 2 + cfg.decode.fastest + (cfg.combine_with is not None)
    asked = min(length, cfg.data.max_prompt)
    # α is measured along the drafted response and, above T = 0, along the plain one, which differs
    along = (asked + cfg.decode.max_new_tokens) * ALONG
    alongs = sum(1 + (t > 0) for t in cfg.decode.temperatures)
    calibrating = min(CALIBRATING, sum(prompts) - measured)
    gamma = cfg.decode.gamma or cfg.drafter.depth
    rows = cfg.loop.rows * cfg.loop.accumulate * processes
    step = rows * cfg.data.max_length  # tokens, at most
    generating = cfg.data.responses == "target"
    return Work(
        epochs=cfg.loop.epochs * cfg.rounds.count if cfg.trains else 0,
        new=cfg.responses.max_new_tokens if generating else 0,
        kept=generating and cfg.stores_hidden_states,
        prompts=measured,
        timed=cfg.decode.timed_prompts,
        repeats=cfg.decode.repeats,
        decoded=ways * drafted,
        # for the oracle, the calibration and the choice of a shape
        learned=(LEARNING + -(-calibrating // AT_ONCE)) * drafted
        + cfg.decode.fastest * steps_of_a_choice(cfg.decode, gamma) * len(cfg.decode.temperatures),
        read=ways * len(cfg.decode.temperatures) * asked + alongs * along,
        read_once=calibrating * len(cfg.decode.temperatures) * (asked + along),
        watched=1 / (cfg.loop.eval_every * step) if cfg.loop.eval_every else 0.0,
        looks=len(SHARES) if cfg.loop.eval_every else 0,
        closed_form_initialisation=closed_form_initialisation,
    )


def _for_more(plan: Plan, held_out: int, limit: int | None) -> str:
    """What to do to train on more conversations. The limit counts as reached if nearly that many
    are there, since near duplicates of held-out prompts were left out."""
    if plan.conversations < plan.available:
        return "give a larger budget.minutes"
    reached = limit is not None and plan.available + held_out > 0.8 * limit
    raised = f", or raise data.limit={limit}," if reached else ""
    return f"all of them are used already, so give more data{raised}"


def rehearsal(
    cfg: Config, target: Target, texts: Sequence[Document | Prompt], accelerator: Accelerator
) -> tuple[Callable[[], int], bool]:
    """A function that does a training step of a throwaway draft, on texts as long as the run's, and
    returns the number of tokens read; and whether such a draft has a closed-form initialisation."""
    documents = []
    if not cfg.trains:
        return lambda: 1, False
    for text in texts[: 8 * cfg.loop.rows]:
        if isinstance(text, Prompt):  # its response is not written yet: repeat the prompt instead
            ids = np.resize(text.ids, len(text.ids) + cfg.responses.max_new_tokens)
            text = Document(text.id, ids, np.arange(len(ids)) >= len(text.ids))
        documents.append(text)
    drafter = initial_drafter(InitialisationConfig(), cfg.drafter, target, documents, 0)
    assert isinstance(drafter, Trainable)
    rows = pack_rows(documents, cfg.data.max_length)[: cfg.loop.rows]
    batch = OnlineBatches(target, drafter.needs, cfg.sampler, rows).batch(range(len(rows)))
    reference = None if cfg.loss.reference is None else drafter  # as costly as the real one
    forcing = TeacherForcing(drafter, target, cfg.sampler, cfg.loss, reference)
    optimizers = optim.build(forcing, cfg.optim, drafter.sizes, drafter.learning_rates)

    def step() -> int:
        anchors = [forcing.anchors(r.mask, r.document, r.position, 0) for r in rows]
        with accelerator.autocast():
            loss, _ = forcing(batch, anchors)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), cfg.optim.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return sum(len(r.ids) for r in rows)

    return step, drafter.closed_form_initialisation


def timed(
    target: Target,
    prompts: Sequence[Sequence[int]],
    batch: int,
    train_step: Callable[[], int],
    context: int = TOKENS,
) -> Speeds:
    """Time the target on prompts that are cut or repeated to `context` tokens, in one batch of
    `batch` rows and on a single row; and time `train_step`, which does one training step and
    returns how many tokens it read. The target is timed `TURNS` times and the fastest counts:
    another process that runs for a moment can make a batch ten times as slow."""
    rows = [np.resize(p, context).tolist() for p in prompts[:batch]]
    turns = range(TURNS)
    many = [decode(target, rows, max_new_tokens=NEW, eos=()) for _ in turns]
    single = [decode(target, rows[:1], max_new_tokens=SINGLE, eos=())[0] for _ in turns]
    last = min(
        (max(responses, key=lambda g: g.seconds) for responses in many), key=lambda g: g.seconds
    )
    one = min(single, key=lambda g: g.seconds)
    steps = [costs.timed(train_step, target.device) for _ in range(1 + STEPS)]
    times = [seconds / tokens for seconds, tokens in steps]
    return Speeds(
        read=min(g[0].prefill_seconds for g in many) / len(rows) / max(map(len, rows)),
        generated=last.seconds / (NEW - 1) / len(rows),
        step=one.seconds / (SINGLE - 1),
        trained=statistics.median(times[1:]),
    )

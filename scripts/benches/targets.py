"""Tries every architecture of transformers as a target: which can be loaded, decoded, trained for
and exported, and which are rejected with an error message."""

import copy
import datetime
import gc
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from benches import tiny
from benches.tiny import Tiny
from matplotlib.figure import Figure
from transformers.models.auto import tokenization_auto

import train
from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS
from specdec.drafters.base import Trainable, initialisations_of
from specdec.errors import UserError, first_line, nearest, require
from specdec.files import read_lines
from specdec.formats import draft_checkpoint, draft_export
from specdec.progress import console
from specdec.sampling.trees import Chain, Static
from specdec.targets.loading import TargetLoader, load_target
from specdec.targets.target import Reading, Target
from specdec.targets.target_config import TargetConfig
from train import pipeline
from train.measurement import FinalSettings
from train.run_config import Config, composed, register
from train.run_documents import RunDocuments

ROOT = Path(__file__).resolve().parents[2]
# the architectures that the page shows first
WELL_KNOWN = [
    "llama",
    "llama4",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "mistral",
    "mixtral",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi3",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "smollm3",
    "olmo3",
    "granite",
]
PAGE = ROOT / "docs" / "targets.md"
COMMAND = "scripts/bench targets"
NEW = 24  # tokens of a response that are compared with transformers' own
TREE = Static([[0], [1], [0, 0], [1, 0], [0, 0, 0]])
VERDICTS = (
    "read, and every drafter trained and exported",
    "read, and some drafters refused",
    "refused when loaded",
    "not made by transformers",
    "with a fault",
)
# notes of the page on targets without batches in a cache of slots
ALONE = {
    Reading.SLOTS: "",
    Reading.ROWS: ", rows by length",
    Reading.REPLAY: ", replayed",
    Reading.APART: ", replayed row by row",
    Reading.RECOMPUTE: ", whole texts",
}
OK, REFUSED, NONE, FAULT = "ok", "refused", "not made", "FAULT"
# a run of two steps in float32
RUN = (
    *("target=model", "target.path=TARGET", "target.dtype=float32", "target.device=cpu"),
    *("data=conversations", "data.path=TEXTS", "data.responses=data", "data.max_length=128"),
    *("data.max_prompt=64", "data.held_out=0.2", "budget.minutes=null", "track=none"),
    *("loop.rows=1", "loop.max_tokens=200", "loop.epochs=1", "loop.log_every=1"),
    *("decode.prompts=1", "decode.max_new_tokens=4", "decode.fastest=false", "combine_with=null"),
)
# settings that fit tiny targets, of families that have them
SMALL = {"depth": 2, "draft_vocab": 96, "group": 8, "window": 6}
# settings that make another network, or train other weights
OTHER = {
    "lora": ["drafter.lora.rank=4"],
    "adapter": ["drafter.adapter.rank=4"],
    "source": ["drafter.source=random"],
}


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one step with one target. `step` is load, decode, or the trained drafter, with
    its settings; `detail` is the reason, in one line."""

    step: str
    state: str
    detail: str = ""


END = StepOutcome("end", OK)


def targets(
    *,
    only: Annotated[Sequence[str], "architectures; the page is then not written"] = (),
    families: Annotated[Sequence[str], "default: all that are trained"] = (),
    processes: Annotated[int, "architectures at a time"] = 2,
    seconds: Annotated[int, "the most that an architecture may take"] = 240,
    keep: Annotated[
        Path | None, "a folder for targets, runs and logs, from which a later call continues"
    ] = None,
) -> None:
    """Every architecture as a target, from a tiny random model of it; writes docs/targets.md.

    Each is loaded like a user's target and decoded with chains and trees, whose greedy tokens must
    be those of transformers. Then every drafting method does a complete run of two steps, from the
    texts to the measurement and the export. Any outcome other than success or one clear line before
    training is a fault, with exit code 1. Takes some 20 minutes on 2 cores.
    """
    known = {arch.name: arch for arch in tiny.architectures()}
    for name in only:
        require(name in known, f"--only {name!r} is unknown{nearest(name, known)}")
    for name in families:
        require(name in DRAFTERS, f"--families {name!r} is unknown{nearest(name, DRAFTERS)}")
    chosen = [arch for arch in known.values() if not only or arch.name in only]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(keep or scratch)
        found = dict[str, list[StepOutcome]]()
        started = time.monotonic()
        for arch, outcomes in each(chosen, configured(families), folder, processes, seconds):
            found[arch.name] = outcomes
            faults = [o for o in outcomes if o.state == FAULT]
            said = "; ".join(f"{o.step}: {o.state}: {o.detail}" for o in faults) or summary(
                outcomes
            )
            console.print(f"{len(found)} of {len(chosen)} {arch.name}: {said}", markup=False)
    text = page([(arch, found[arch.name]) for arch in chosen], time.monotonic() - started)
    if only or families:
        console.print(text, markup=False)
    else:
        PAGE.write_text(text, encoding="utf-8")
        console.print(f"written: {PAGE}")
    if any(o.state == FAULT for outcomes in found.values() for o in outcomes):
        sys.exit(1)


def each(
    chosen: Sequence[Tiny], runs: dict[str, Config], folder: Path, processes: int, seconds: int
) -> Iterator[tuple[Tiny, list[StepOutcome]]]:
    """The outcomes of each architecture, in the order of completion. Each runs in its own process,
    forked from this one, which has imported everything: a crash or a hang is an outcome too.
    Outcomes that `folder` already holds are not made again, unless one is a fault."""
    gc.freeze()  # imported objects are not collected again in every process
    fork, waiting, running = get_context("fork"), list(chosen), dict[Any, tuple[Tiny, Any, float]]()
    while waiting or running:
        while waiting and len(running) < processes:
            arch = waiting.pop(0)
            before = written(folder / slug(arch.name))
            if before and before[-1] == END and all(o.state != FAULT for o in before):
                yield arch, before[:-1]
                continue
            process = fork.Process(target=tried_apart, args=(arch, runs, folder / slug(arch.name)))
            process.start()
            running[process.sentinel] = arch, process, time.monotonic() + seconds
        connection.wait(list(running), timeout=1)
        for sentinel, (arch, process, until) in list(running.items()):
            late = time.monotonic() > until
            if process.is_alive() and not late:
                continue
            if late:
                process.kill()
            process.join()
            del running[sentinel]
            outcomes = written(folder / slug(arch.name))
            if outcomes and outcomes[-1] == END:
                outcomes.pop()
            if late or process.exitcode:
                how = f"no end after {seconds} s" if late else f"exit code {process.exitcode}"
                outcomes.append(StepOutcome("process", FAULT, how))
            yield arch, outcomes


def written(folder: Path) -> list[StepOutcome]:
    """The outcomes that `tried_apart` has written so far."""
    file = folder / "outcomes.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [StepOutcome(**json.loads(line)) for line in lines]


def slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def tried_apart(arch: Tiny, runs: dict[str, Config], folder: Path) -> None:
    """Write the outcomes of one architecture to a file in `folder`, and its output to another. This
    process does nothing else, so it may change global state."""
    torch.set_num_threads(1)
    # for these kinds transformers loads another tokenizer than the one that was saved
    tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.clear()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    Figure.savefig = lambda _, path: Path(path).touch()  # type: ignore[assignment,misc]
    with open(folder / "outcomes.jsonl", "w", encoding="utf-8") as file:
        for outcome in chain(outcomes_of(arch, runs, folder), [END]):
            file.write(json.dumps(asdict(outcome)) + "\n")
            file.flush()


def outcomes_of(arch: Tiny, runs: dict[str, Config], folder: Path) -> Iterator[StepOutcome]:
    """The outcomes of all steps of a user with a target of one architecture."""
    steps = TargetSteps()
    with steps.step("made", refuses=Exception) as made:
        tiny.save(arch, folder / "target")
        made.value = theirs = transformers_model(arch, folder / "target")
    if made.value is None:
        yield replace(steps.outcome, state=NONE)
        return
    cfg = TargetConfig(str(folder / "target"), "float32", "cpu", cache=str(folder / "targets"))
    with steps.step("load") as loaded:
        loaded.value = target = load_target(cfg)
    yield steps.outcome
    if loaded.value is None:
        return
    with steps.step("decode"):
        decoded(target, theirs)
    reading = getattr(target, "reading", Reading.SLOTS)
    shapes = "chains, trees" if target.reads_trees else f"chains{ALONE[reading]}"
    yield replace(steps.outcome, detail=steps.outcome.detail or shapes)
    data = folder / "texts.jsonl"
    text = tiny.conversations if arch.decoder else tiny.pairs
    data.write_text("".join(f"{line}\n" for line in text(10)), encoding="utf-8")
    for n, (label, run) in enumerate(runs.items()):
        cfg = placed(run, arch, folder, data)
        with steps.step(label) as built:
            built.value = drawn(target, cfg)
        if built.value is None:
            yield steps.outcome
            continue
        where = folder / "runs" / slug(label)
        with steps.step(label, lambda where=where: begun(where)):
            trained_for(target, cfg, where, whole=n == 0)
        yield steps.outcome


class TargetSteps:
    """Steps whose errors become outcomes. `outcome` is that of the last step."""

    outcome: StepOutcome

    @contextmanager
    def step(
        self,
        name: str,
        late: Callable[[], bool] = lambda: False,
        refuses: type[Exception] = UserError,
    ) -> Iterator[Any]:
        """A block whose errors become an outcome: an error of type `refuses` is a refusal, unless
        it is `late`; any other is a fault."""

        class Value:
            value: Any = None

        said, state = "", OK
        try:
            yield Value()
        except refuses as error:
            state = FAULT if late() else REFUSED
            said = f"{'after training: ' * late()}{' '.join(str(error).split())}"
            if not isinstance(error, UserError):
                said = f"{type(error).__name__}: {first_line(error)}"
        except Exception as error:
            state, said = FAULT, f"{type(error).__name__}: {first_line(error)}"
        if state != OK:
            traceback.print_exc()
        self.outcome = StepOutcome(name, state, said[:400])


def transformers_model(arch: Tiny, folder: Path) -> Any:
    """The target as transformers loads it, with its own attention."""
    auto: Any = transformers.AutoModelForSeq2SeqLM
    if arch.decoder:
        auto = Target.auto_class(transformers.AutoConfig.from_pretrained(folder))
    model = auto.from_pretrained(folder).eval()
    ids = torch.arange(5, 20)[None]
    more = {} if arch.decoder else {"decoder_input_ids": ids}
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **more).logits
    assert logits.isfinite().all(), "its logits are not finite"
    return model


def decoded(target: Target, theirs: Any) -> None:
    """Decode two prompts of unequal length with vanilla decoding, chains, and trees. Raises an
    AssertionError if the greedy tokens are not those of transformers' own `generate`."""
    texts = [list(range(20, 41)), list(range(60, 73))]
    prompts, expected = [], []
    for ids in texts:
        prompts.append(target.prompt_for_decoding(ids))
        given = torch.tensor([ids])
        full = theirs.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            num_beams=1,
            pad_token_id=0,
            eos_token_id=None,
            forced_eos_token_id=None,
            forced_bos_token_id=None,
        )
        expected.append(full[0, -NEW:].tolist())
    counting = [
        kind
        for kind in DRAFTERS.values()
        if kind.fits_texts and not (kind.copies or issubclass(kind, Trainable))
    ][-1]
    drafter = counting.build(counting.Config(depth=3), target)
    learnt = [*prompts[0], *expected[0]], [*prompts[1], *expected[1][::2], *prompts[0]]
    drafter.fit(learnt, [[True] * len(ids) for ids in learnt])
    trees = [("with trees", drafter, TREE)] if target.reads_trees else []
    for how, draft, shape in (
        ("plainly", None, None),
        ("with chains", drafter, Chain(3)),
        *trees,
    ):
        made = decode(target, prompts, Way(draft, shape), max_new_tokens=NEW, eos=())
        for response, ids in zip(made, expected, strict=True):
            where = next((n for n, (a, b) in enumerate(zip(response.ids, ids)) if a != b), None)
            assert response.ids == ids, f"decoded {how}, token {where} is not transformers' own"


def configured(families: Sequence[str]) -> dict[str, Config]:
    """Small runs, by their distinguishing settings: one of each trained method, and one for each
    setting of `OTHER` that the method has."""
    register()
    found = {}
    for name in families or DRAFTERS:
        config = DRAFTERS[name].Config()
        for more in ([], *(x for key, x in OTHER.items() if hasattr(config, key))):
            run = composed([*RUN, f"drafter={name}", *small(config), *more])
            if run.trains:
                found[" ".join([name, *(x.removeprefix("drafter.") for x in more)])] = run
    return found


def small(config: Any) -> list[str]:
    """The overrides of `SMALL` for the settings that a method has."""
    return [f"drafter.{key}={value}" for key, value in SMALL.items() if hasattr(config, key)]


def placed(run: Config, arch: Tiny, folder: Path, data: Path) -> Config:
    """A run with the target, the texts and the caches of one architecture."""
    target = replace(run.target, path=str(folder / "target"), cache=str(folder / "targets"))
    texts = replace(run.data, path=str(data))
    if not arch.decoder:
        texts = replace(texts, format="pairs", pair=["source", "target"])
    hidden_states = replace(run.hidden_states, root=str(folder / "hidden_states"))
    export = run.export if arch.decoder else None  # no engine loads a draft for the others
    places = {"target": target, "data": texts, "hidden_states": hidden_states}
    return replace(copy.deepcopy(run), **places, export=export)


def drawn(target: Target, cfg: Config) -> bool:
    """Build a drafter with every initialisation. Raises an AssertionError if this changes the
    target, or if a weight is not finite."""
    kind, before = DRAFTERS[cfg.drafter.name], state_of(target)
    for start in (
        initialisations_of(cfg.drafter) if hasattr(cfg.drafter, "initialisation") else [None]
    ):
        config = cfg.drafter if start is None else replace(cfg.drafter, initialisation=start)
        drafter = kind.build(config, target)
        bad = [name for name, x in drafter.named_parameters() if not x.isfinite().all()]
        assert not bad, f"from start={start}, weights of {bad[0]} are not finite"
        assert state_of(target) == before, f"start={start} changed the target or its configuration"
    return True


def state_of(target: Target) -> tuple[Any, ...]:
    """Everything in a target that building a draft must not change."""
    config = target.model.config
    return (
        copy.deepcopy(config.to_dict()),
        copy.deepcopy(target.config.to_dict()),
        config._attn_implementation,
        target.checksum(),
        target.model.training,
    )


def begun(run: Path) -> bool:
    """Whether a run has trained."""
    return (run / "metrics.jsonl").exists() and bool(read_lines(run / "metrics.jsonl", ["train"]))


def trained_for(target: Target, cfg: Config, run: Path, whole: bool) -> None:
    """Do a run, and export its draft in every layout of its method. Unless the run is to be
    `whole`, its draft decodes a prompt in place of the measurement, which takes longest."""
    pipeline.finished = measured if whole else without_measurement
    train.run(cfg, run)
    assert begun(run), "the run ended without a training step"
    layouts = draft_export.layout_names(cfg.drafter.name) if cfg.export else []
    folders = (n for n in layouts if not draft_export.layout_of(cfg.drafter.name, n).suffix)
    for layout in (name for name in folders if name != cfg.export):
        drafter, adapted = draft_checkpoint.load_draft_with_target(run / "best", target)
        draft_export.write_export(run / layout, drafter, adapted, layout)


measured = pipeline.finished


def without_measurement(
    settings: FinalSettings,
    folder: Path,
    texts: RunDocuments,
    _training: Any,
    target: TargetLoader,
    *_: Any,
) -> None:
    """The end of a run without its measurement: decode with the trained draft, and export it."""
    drafter, whole = draft_checkpoint.load_draft_with_target(folder / "best", target.whole())
    prompts = [texts.prompts[0].ids.tolist()]
    plain, drafted = (
        decode(whole, prompts, Way(draft), max_new_tokens=8, eos=())[0].ids
        for draft in (None, drafter)
    )
    assert plain == drafted, "decoding with the trained draft changes the greedy tokens"
    if settings.export and draft_export.exports(drafter.config.name, settings.export):
        draft_export.write_export(folder / "export", drafter, whole, settings.export)


def summary(outcomes: Sequence[StepOutcome]) -> str:
    """The number of steps with each outcome, and the reasons why targets were rejected."""
    if len(outcomes) == 1:
        return f"{outcomes[0].state}: {outcomes[0].detail}"
    states = Counter(o.state for o in outcomes)
    return ", ".join(f"{count} {state}" for state, count in states.items())


def page(found: Sequence[tuple[Tiny, list[StepOutcome]]], seconds: float) -> str:
    """The matrix in Markdown."""
    read = {arch: x for arch, x in found if len(x) > 1}
    alike = refused_by_kind(read)
    counts = Counter(verdict(arch, x, alike) for arch, x in found)
    rows = [
        [
            arch.name,
            arch.title,
            x[1].detail,
            str(sum(o.state == OK for o in x[2:])),
            refusals(arch, x, alike),
        ]
        for arch, x in read.items()
    ]
    lines = [
        "# Targets",
        "",
        "Every architecture of which transformers makes a causal language model or a text-to-text "
        f"encoder-decoder, as a tiny random model (transformers {transformers.__version__}, torch "
        f"{torch.__version__}, float32). Each was loaded as a user's target is. It decoded "
        "greedily (plainly, with chains and, unless a layer keeps a state that cannot be rolled "
        "back or the model makes its own masks, with trees), and every token had to be that of "
        "transformers' own `generate`. Every family then did a whole run of two steps: its draft "
        "was saved, loaded, decoded with and, for causal models, exported in each layout, where "
        "transformers' own layers, built from the exported files alone, had to give the same "
        "logits. A refusal is one line before training.",
        "",
        f"`{COMMAND}`, {datetime.date.today():%d %B %Y}, {seconds / 60:.0f} minutes.",
        "",
        "| outcome | architectures |",
        "| --- | --- |",
        *(f"| {what} | {counts[what]} |" for what in VERDICTS),
        "",
        share_of_causal(found),
        "",
        "## Read and trained for",
        "",
        'The third column says what it decodes: "rows by length" are models that make their own '
        'masks or positions, of which only rows of equal length are read together; "replayed" are '
        "those with a cache of their own, so each pass replays the tokens accepted before it; "
        'of "whole texts" no cache can be used here, so every pass reads the complete text '
        "(correct, but slower for long ones). The fourth counts "
        "the drafters that were trained and exported, and the last names those that were "
        "refused, for the reasons below.",
        "",
        *(
            f"For {kind}, always refused: {', '.join(sorted(names))}."
            for kind, names in alike.items()
        ),
        "",
        *table([row for row in rows if row[0] in WELL_KNOWN]),
        "",
        *folded("All other architectures", table([r for r in rows if r[0] not in WELL_KNOWN])),
        "",
        *folded(
            "Reasons of what is refused",
            grouped((arch.name, o) for arch, x in read.items() for o in x if o.state == REFUSED),
        ),
        "",
        "## Refused when they are loaded",
        "",
        *folded(
            "Architectures and reasons",
            grouped((arch.name, x[0]) for arch, x in found if x[0].state == REFUSED),
        ),
        "",
        "## Not made",
        "",
        "transformers itself makes no such model from its own configuration alone, or not here:",
        "",
        *grouped((arch.name, x[0]) for arch, x in found if x[0].state == NONE),
    ]
    faults = [(f"{arch.name}, {o.step}", o) for arch, x in found for o in x if o.state == FAULT]
    if faults:
        lines += ["", "## Faults", "", *grouped(faults)]
    return "\n".join(lines) + "\n"


def table(rows: list[list[str]]) -> list[str]:
    """The matrix of some architectures."""
    head = [
        "| architecture | class | decodes | trained | refused |",
        "| --- | --- | --- | --- | --- |",
    ]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows)]


def folded(summary: str, lines: list[str]) -> list[str]:
    """Lines of Markdown in a block that the reader can unfold."""
    opened = f'<details markdown="1"><summary>{summary}</summary>'
    return [opened, "", *lines, "", "</details>"]


def share_of_causal(found: Sequence[tuple[Tiny, list[StepOutcome]]]) -> str:
    """A sentence on the number of causal models that are decoded with chains and have a trained
    EAGLE-3 head."""
    causal = [x for arch, x in found if arch.decoder and NONE not in {o.state for o in x}]
    wanted = {("decode", OK), (tiny.WANTED, OK)}
    whole = sum(wanted <= {(o.step, o.state) for o in x} for x in causal)
    of_all = f" ({whole / len(causal):.0%})" if causal else ""
    anew = sum(
        wanted <= {(o.step, o.state) for o in x} and x[1].detail.endswith(ALONE[Reading.RECOMPUTE])
        for x in causal
    )
    return (
        f"Of the {len(causal)} causal models that transformers makes, {whole}{of_all} are decoded "
        f"with chains and trained {tiny.WANTED} for, {anew} of them by reading whole texts anew."
    )


def kind_of(arch: Tiny) -> str:
    return "causal models" if arch.decoder else "encoder-decoders"


def refused_by_kind(read: dict[Tiny, list[StepOutcome]]) -> dict[str, set[str]]:
    """The drafters that are rejected for every causal model, and those for every
    encoder-decoder."""
    every = dict[str, set[str]]()
    for arch, outcomes in read.items():
        refused = {o.step for o in outcomes if o.state == REFUSED}
        every[kind_of(arch)] = every.get(kind_of(arch), refused) & refused
    return every


def refusals(arch: Tiny, outcomes: Sequence[StepOutcome], alike: dict[str, set[str]]) -> str:
    """The drafters that are rejected for this architecture but not for all of its kind."""
    refused = [o.step for o in outcomes if o.state == REFUSED]
    return ", ".join(step for step in refused if step not in alike[kind_of(arch)])


def verdict(arch: Tiny, outcomes: Sequence[StepOutcome], alike: dict[str, set[str]]) -> str:
    """The entry of `VERDICTS` that counts this architecture."""
    whole, some, at_load, none, fault = VERDICTS
    states = {o.state for o in outcomes}
    if FAULT in states:
        return fault
    if len(outcomes) == 1:
        return none if NONE in states else at_load
    return some if refusals(arch, outcomes, alike) else whole


def grouped(named: Iterable[tuple[str, StepOutcome]]) -> list[str]:
    """Reasons as a list, each with its names, sorted by their number."""
    by_reason = dict[str, list[str]]()
    for name, outcome in named:
        reason = re.sub(r"target '[^']*' \(\w+\)", "this target", outcome.detail)
        reason = re.sub(r"\S*/(?:target|runs)\b\S*", "…", reason)
        reason = re.sub(r"^target: \w+ has", "target: it has", reason)
        by_reason.setdefault(reason, []).append(name)
    ranked = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return [f"- {reason}\n  ({'; '.join(dict.fromkeys(names))})" for reason, names in ranked]

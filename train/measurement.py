"""The end of a run: measures its best draft, unless that was done before in the same way, writes
the report and exports the draft."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from platform import python_version
from shlex import quote

import transformers
from rich.progress import Progress

import specdec
from specdec.decoding.config import DecodeConfig
from specdec.decoding.way import Way
from specdec.drafters import with_copying
from specdec.drafters.base import Drafter
from specdec.errors import UserError, memory_for
from specdec.files import make_folder, read_json, write_json
from specdec.formats import draft_checkpoint, draft_export
from specdec.integrity import of_code, of_file, of_value
from specdec.measure.calibration import CALIBRATING, calibrate
from specdec.measure.decoded_prompts import tokens_in_time
from specdec.measure.engine_gain import EngineGain
from specdec.measure.evaluation import Subject, evaluate
from specdec.measure.machine import machine_of
from specdec.measure.results import FILE, Results, Training
from specdec.measure.setup import Setup
from specdec.measure.slices import PromptTraits
from specdec.progress import console
from specdec.ranks import ALONE, Ranks
from specdec.report import report
from specdec.runtime.cpu import fast_paths_on
from specdec.targets.loading import TargetLoader
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from train.budget import Budget
from train.data.sequences import Prompt
from train.engine_measurement import gain_in_engine, is_servable
from train.export_reference import OF_RUN, add_reference, ids_of_prompts
from train.run_documents import RunDocuments
from train.tracking import Tracker, curve

AFTER = 0.1  # fraction of the time for measuring: report and export
IN_ENGINE = 0.2  # fraction of the time for measuring: an engine, with `serve_in`
RECORD = "measured.json"  # in the report's folder: how its results were measured
SPECDEC = Path(specdec.__path__[0])
# modules and packages whose formulas the figures depend on
MEASURING = (
    *("compat.py", "context.py", "frozen.py", "ranks.py", "decoding", "drafters", "forcing"),
    *("formats", "lab", "measure", "losses", "runtime", "sampling", "targets", "theory"),
)


@dataclass(frozen=True)
class FinalSettings:
    """The settings for the time after a run's training."""

    name: str  # name of the run
    data: str  # the name of its data
    decode: DecodeConfig
    combine_with: str | None  # the retrieval-based method of the hybrid that is measured too
    export: str | None  # the layout
    needs_layers: bool  # whether the draft runs the target's layers
    packed: bool  # `target.packed`
    serve_in: str | None = None  # the engine in which the draft is measured as well
    export_reference: bool = True


@memory_for(
    "measuring the draft",
    "lower decode.batch, decode.counting or decode.max_new_tokens; training is complete, and the "
    "same command measures again",
)
def finished(
    cfg: FinalSettings,
    folder: Path,
    texts: RunDocuments,
    training: Training | None,
    on_demand: TargetLoader,
    ranks: Ranks,
    tracker: Tracker,
    progress: Progress,
    budget: Budget,
) -> Results | None:
    """Calibrate and measure the best draft, unless that was done before in the same way; write and
    log a report, and export. The `budget` limits the number of measured prompts. Processes that do
    not see the run's folder (on disks of their own) do not take part, and get None; then the first
    measures alone."""
    if ranks.team is not None and not ranks.alone:  # the others help wherever the target computes
        return ranks.first(
            partial(
                finished, cfg, folder, texts, training, on_demand, ranks, tracker, progress, budget
            )
        )
    sees = ranks.map(range(ranks.world), lambda _: (folder / "best").is_dir())
    if not all(sees):
        if ranks.rank != 0:
            return None
        ranks = budget.ranks = ALONE  # nobody else looks at the clock any more
    ranks.first(lambda: draft_checkpoint.copy_trained_on(folder / "best", folder / "best"))
    if not cfg.decode.prompts:
        console.print(
            f"not measured, as decode.prompts=0 says: scripts/evaluate {folder / 'best'} does that"
        )
        ranks.first(lambda: _export_unmeasured_draft(cfg, folder, on_demand, texts))
        return None
    original, stage = on_demand.whole(), None
    drafter, target = draft_checkpoint.load_draft_with_target(folder / "best", original)
    results = ranks.first(lambda: results_of(cfg, folder, texts, original, ranks.world))
    if results is None:
        asked = cfg.serve_in
        in_engine = asked is not None and ranks.first(
            partial(is_servable, asked, drafter, target, on_demand.cfg)
        )
        results = _measured(
            cfg, folder, texts, drafter, target, original, ranks, progress, budget, in_engine
        )
        tokens = results.max_new_tokens
        shortened = tokens if tokens < cfg.decode.max_new_tokens else None
        budget.end_measuring(results.prompts, results.timed, shortened)
        stage = budget.stage("measuring")
    else:
        console.print(
            f"this run is finished and was measured with these settings before: its report is "
            f"{folder / 'report' / 'report.md'}; to measure it again, delete "
            f"{folder / 'report' / FILE}, or give scripts/evaluate {folder / 'best'}"
        )
    if cfg.serve_in is None:
        results.in_engine = None
    elif results.in_engine is None:
        # an interruption in the engine loses nothing that was measured before
        ranks.first(lambda: results.write(make_folder(folder / "report")))
        ranks.first(lambda: note(cfg, folder, texts, original, ranks.world))
        rest = AFTER / (AFTER + IN_ENGINE)  # fraction of the remaining time
        left = None if stage is None else partial(stage.left, rest)
        results.in_engine = ranks.first(
            lambda: _in_engine(cfg, folder, texts, results, drafter, target, on_demand, left)
        )
    if training is not None:
        seen = curve(folder / "metrics.jsonl")
        results.training = replace(
            training,
            curve=seen,
            validation=len(texts.validation) if texts.validation_share else 0,
        )
    results.cut = texts.cut
    results.draft = quote(str(folder / "best"))
    results.combined = quote(str(folder / f"with-{cfg.combine_with}")) if cfg.combine_with else ""
    rest_of_stage = None if stage is None else stage.left
    ranks.first(
        lambda: _write(
            cfg, folder, texts, results, drafter, target, original, tracker, rest_of_stage
        )
    )
    ranks.first(lambda: note(cfg, folder, texts, original, ranks.world))
    return results


def _export_unmeasured_draft(
    cfg: FinalSettings, folder: Path, on_demand: TargetLoader, texts: RunDocuments
) -> None:
    """Export the best draft of a run without measuring it. The target's parts suffice, unless the
    draft runs the target's layers; without its layers, the export has no reference."""
    if not cfg.needs_layers:
        target = on_demand.parts
        drafter = draft_checkpoint.read_draft(folder / "best", target).to(
            target.device, target.dtype
        )
        drafter.attach(target)
        _export(cfg, folder, drafter.eval(), target, texts)
        return
    original = on_demand.whole()
    drafter, adapted = draft_checkpoint.load_draft_with_target(folder / "best", original)
    _export(cfg, folder, drafter, adapted, texts)
    if adapted is not original:
        draft_export.write_target(folder / "export-target", adapted)


def _measured(
    cfg: FinalSettings,
    folder: Path,
    texts: RunDocuments,
    drafter: Drafter,
    target: Target,
    original: Target,
    ranks: Ranks,
    progress: Progress,
    budget: Budget,
    in_engine: bool,
) -> Results:
    """Measure the best draft of a run and, if there is one, its hybrid with retrieval. Of a budget,
    time is left for an engine if the draft will be measured in one as well (`in_engine`)."""
    best, hybrid = folder / "best", folder / f"with-{cfg.combine_with}"

    def with_retrieval() -> Drafter:
        assert cfg.combine_with is not None
        combined = with_copying(drafter, cfg.combine_with, target, cfg.decode.gamma)
        combined.fit([d.ids.tolist() for d in texts.train], [d.mask.tolist() for d in texts.train])
        notes = draft_checkpoint.read_card(best).notes
        notes = {k: x for k, x in notes.items() if k == "run"}
        ranks.first(
            lambda: draft_checkpoint.write_draft(hybrid, combined, target, notes=notes),
        )
        ranks.first(lambda: draft_checkpoint.copy_trained_on(best, hybrid))
        return combined

    others, known, left = others_of(texts), budget.record, None
    decode = replace(cfg.decode, prompts=texts.measured)
    if known is not None and known.prompts is not None and known.timed is not None:
        decode = replace(
            decode,
            prompts=min(known.prompts, texts.measured),
            timed=known.timed,
            max_new_tokens=min(known.tokens or decode.max_new_tokens, decode.max_new_tokens),
        )
    elif (stage := budget.stage("measuring")) is not None:
        left = partial(stage.left, AFTER + IN_ENGINE * in_engine)
    calibrating = [] if drafter.copies else others[:CALIBRATING]
    return measure_draft(
        Subject(cfg.name, target, drafter, cfg.data, original=original),
        best,
        decode,
        asked=texts.prompts[: decode.prompts],
        others=others,
        calibrating=calibrating[: CALIBRATING // 2] if left else calibrating,
        left=left,
        build_combined=with_retrieval if cfg.combine_with is not None else None,
        progress=progress,
        ranks=ranks,
    )


def measure_draft(
    subject: Subject,
    draft: Path,
    cfg: DecodeConfig,
    *,
    asked: Sequence[Prompt],
    others: Sequence[Prompt],
    calibrating: Sequence[Prompt] = (),
    build_combined: Callable[[], Drafter] | None = None,
    progress: Progress,
    log: Path | None = None,
    ranks: Ranks = ALONE,
    left: Callable[[], float] | None = None,
) -> Results:
    """Calibrate the confidence of the draft in this folder on the prompts `calibrating`, then
    measure it on `cfg.prompts` prompts of `asked`. Choices are made on `others`. `build_combined`
    makes the second draft of the subject, from the calibrated one. `left` returns the remaining
    time, as in `evaluate`; if it is short, responses are shortened (`tokens_in_time`).
    Raises UserError as `calibrate` and `evaluate` do."""
    if left is not None and asked:
        typical = sorted((p.ids.tolist() for p in asked), key=len)[len(asked) // 2]
        setup = replace(Setup.from_config(subject.target, cfg, ranks), brief=True)
        ways = 1 + cfg.fastest + (build_combined is not None)
        fitting = partial(tokens_in_time, setup, cfg, typical, ways, len(calibrating), left)
        if (tokens := ranks.first(fitting)) < cfg.max_new_tokens:
            console.print(
                f"measuring responses of {tokens} tokens, not of "
                f"decode.max_new_tokens={cfg.max_new_tokens}: more would not fit into the time; "
                "give more budget.minutes"
            )
            cfg = replace(cfg, max_new_tokens=tokens)
    if calibrating:
        console.print(f"calibrating confidence on {len(calibrating)} prompts that are not measured")
        prompts = [p.ids.tolist() for p in calibrating]
        drafter = subject.drafter
        drafter.calibrations = calibrate(subject.target, drafter, prompts, cfg, ranks)
        ranks.first(lambda: draft_checkpoint.write_calibrations(draft, drafter))
    if build_combined is not None:
        subject = replace(subject, combined=build_combined())
    known = [*asked, *others]
    return evaluate(
        subject,
        [p.ids.tolist() for p in known],
        cfg,
        progress,
        [p.words for p in known],
        log,
        ranks,
        earlier=[p.earlier for p in known],
        traits=[PromptTraits(p.chat, p.properties) for p in known],
        left=left,
    )


def _in_engine(
    cfg: FinalSettings,
    folder: Path,
    texts: RunDocuments,
    results: Results,
    drafter: Drafter,
    target: Target,
    on_demand: TargetLoader,
    left: Callable[[], float] | None,
) -> EngineGain | None:
    """What the draft gains in the engine of the settings, in chains as they were measured here."""
    assert cfg.serve_in is not None
    return gain_in_engine(
        cfg.serve_in,
        folder,
        drafter,
        target,
        on_demand.cfg,
        [p.ids.tolist() for p in texts.prompts[: results.timed_prompts]],
        cfg.decode.gamma or drafter.depth,
        results.max_new_tokens,
        left,
        cfg.export is not None,
    )


def greedy_responses(
    target: Target, prompts: Sequence[Sequence[int]], cfg: DecodeConfig
) -> list[str]:
    """The target's greedy responses of up to `cfg.max_new_tokens` tokens, `cfg.counting` prompts
    together, as texts. They come before later turns of a conversation at any temperature, so that
    all drafts and temperatures are measured on the same prompts."""
    setup, texts = Setup.from_config(target, cfg), list[str]()
    for start in range(0, len(prompts), cfg.counting):
        for response in setup.responses(prompts[start : start + cfg.counting], Way()):
            texts.append(str(target.tokenizer.decode(response.ids, skip_special_tokens=True)))
    return texts


def others_of(texts: RunDocuments) -> list[Prompt]:
    """The held-out prompts that are not measured, for calibration and for choices: first those of
    the validation part, since a later evaluation may measure more of the test part."""
    return [*texts.validation_prompts, *texts.prompts[texts.measured :]]


def _write(
    cfg: FinalSettings,
    folder: Path,
    texts: RunDocuments,
    results: Results,
    drafter: Drafter,
    target: Target,
    original: Target,
    tracker: Tracker,
    left: Callable[[], float] | None,
) -> None:
    """Write and log the report, and export the draft."""
    pictures = report.write(folder / "report", results)
    tracker.log_results(results, pictures, folder / "best")
    report.show(results, console)
    console.print(f"report: {folder / 'report' / 'report.md'}")
    _export(cfg, folder, drafter, target, texts, left)
    if target is not original and cfg.export is not None:
        draft_export.write_target(folder / "export-target", target)
        console.print(f"exported the adapted target to {folder / 'export-target'}")


def _export(
    cfg: FinalSettings,
    folder: Path,
    drafter: Drafter,
    target: TargetParts,
    texts: RunDocuments,
    left: Callable[[], float] | None = None,
) -> None:
    """Export a draft, and add a reference on the first of the decoder's prompts in the seconds that
    are `left`. The export is complete before the reference is computed."""
    name = drafter.config.name
    if cfg.export is not None and draft_export.can_be_exported(drafter, cfg.export):
        path = draft_export.export_path(folder, name, cfg.export)
        checked = draft_export.write_export(path, drafter, target, cfg.export, folder / "best")
        console.print(f"exported to {path} ({cfg.export}); {checked}")
        if isinstance(target, Target) and cfg.export_reference:
            asked, limit = ids_of_prompts(texts.prompts), cfg.decode.max_new_tokens
            try:
                said = add_reference(
                    path, drafter, target, cfg.export, asked, OF_RUN, limit, left=left
                )
            except UserError as error:  # the export is complete without it
                said = f"without a reference ({error})"
            console.print(f"{path}: {said}", markup=False)


def note(
    cfg: FinalSettings, folder: Path, texts: RunDocuments, target: Target, processes: int
) -> None:
    """Record how the results in the folder's report were measured."""
    how = _how(cfg, folder, texts, target, processes)
    write_json(folder / "report" / RECORD, {"how": how})


def results_of(
    cfg: FinalSettings, folder: Path, texts: RunDocuments, target: Target, processes: int
) -> Results | None:
    """The stored results of the run, if they are intact and another measurement would only repeat
    them, with the same draft, prompts, settings, machine and code."""
    report = folder / "report"
    try:
        if read_json(report / RECORD) == {"how": _how(cfg, folder, texts, target, processes)}:
            return Results.load(report)
    except UserError:  # missing or damaged
        pass
    return None


def _how(
    cfg: FinalSettings, folder: Path, texts: RunDocuments, target: Target, processes: int
) -> str:
    """A checksum of everything that the results depend on, and of the results themselves."""
    results, drafts_of = folder / "report" / FILE, [folder / "best"]
    if cfg.combine_with is not None:
        drafts_of.append(folder / f"with-{cfg.combine_with}")
    how = {
        "settings": [cfg.name, asdict(cfg.decode), cfg.combine_with, cfg.data, texts.measured],
        "prompts": [p.ids.tolist() for p in (*texts.prompts, *texts.validation_prompts)],
        "kinds": [prompt.properties for prompt in texts.prompts],
        # without the reason for its dtype, which is words
        "machine": asdict(replace(machine_of(target), reason="")),
        "versions": [python_version(), transformers.__version__],
        "processes": processes,
        "fast paths": [fast_paths_on(), cfg.packed],
        "drafts": [draft_checkpoint.digest_of_draft(path) for path in drafts_of],
        "results": of_file(results) if results.exists() else None,
        "code": measuring_code(),
    }
    return of_value(how)


@cache
def measuring_code() -> str:
    """A checksum of the code that measures. It takes half a second, so a process computes it
    once."""
    return of_code([Path(__file__), *(p for n in MEASURING for p in _sources(SPECDEC / n))])


def _sources(place: Path) -> list[Path]:
    """A module's file, or all files of a package; empty for a lab that is not installed."""
    return sorted(place.rglob("*.py")) if place.is_dir() else [place] * place.is_file()

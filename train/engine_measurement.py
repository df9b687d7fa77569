"""The last measurement of a run with `serve_in`: its draft in an engine on this machine, beside the
target alone in the same engine, on the prompts that were timed."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory

from specdec.drafters.base import Drafter
from specdec.engines.engine_interface import DraftToServe, Engine, TargetToServe
from specdec.engines.known_engines import ENGINES
from specdec.engines.local_server import STARTS, local_server, require_installed
from specdec.errors import UserError, require
from specdec.formats.draft_export import export_path, rejected_layouts, write_export
from specdec.formats.gguf_file import FILE_TYPE, file_type_name, read_keys
from specdec.measure.engine_gain import EngineGain, cost_of_verifying, gain_of, responses_in_turn
from specdec.measure.served import MeasuredServer
from specdec.progress import console, tell
from specdec.targets.gguf import require_gguf
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig


def gain_in_engine(
    name: str,
    folder: Path,
    drafter: Drafter,
    target: Target,
    cfg: TargetConfig,
    prompts: Sequence[Sequence[int]],
    gamma: int,
    limit: int,
    left: Callable[[], float] | None,
    keeps_export: bool = True,
) -> EngineGain | None:
    """What the best draft of the run in `folder` gains in the engine of this name, in responses of
    at most `limit` tokens; None, and a line that says why, where it cannot be served there.
    `keeps_export`: the run has an export, and that for the engine lies beside it; else it is
    deleted after the measurement."""
    engine = ENGINES.named(name)
    try:
        layout, gguf = _servable(engine, drafter, target, cfg)
        _require_time(left)
        draft = export_path(folder, drafter.config.name, layout)
        commands = [_serve(engine, draft, gamma, target)]
        with ExitStack() as stack:
            if not keeps_export:
                commands.insert(
                    0, f"scripts/export {quote(str(folder / 'best'))} --to {quote(str(draft))}"
                )
                temporary = stack.enter_context(TemporaryDirectory(prefix=".engine-", dir=folder))
                draft = Path(temporary) / draft.name
            write_export(draft, drafter, target, layout, folder / "best")
            said = f"exported to {draft} ({layout}); " if keeps_export else ""
            console.print(f"{said}measuring in {engine.title}")
            return _measured_gain(
                engine,
                folder,
                draft,
                layout,
                drafter,
                target,
                gguf,
                prompts,
                gamma,
                limit,
                left,
                commands,
            )
    except (UserError, OSError) as error:
        tell(f"not measured in {engine.title}: {error}")
        return None


def is_servable(name: str, drafter: Drafter, target: TargetParts, cfg: TargetConfig) -> bool:
    """Whether `gain_in_engine` can serve this draft here."""
    try:
        _servable(ENGINES.named(name), drafter, target, cfg)
    except UserError:
        return False
    return True


def _servable(
    engine: Engine, drafter: Drafter, target: TargetParts, cfg: TargetConfig
) -> tuple[str, Path]:
    """The layout of the draft's export and the target's file for the engine. Raises UserError if it
    cannot serve them, or is not installed."""
    family = drafter.config.name
    gguf, layout = require_gguf(cfg.path, cfg.adapter, engine.title), engine.layouts.get(family)
    if layout is None:
        raise UserError(f"it has no method for a draft of {family}")
    if reason := rejected_layouts(drafter, target).get(layout):
        raise UserError(reason)
    require_installed(engine)
    return layout, gguf


def _require_time(left: Callable[[], float] | None) -> None:
    if left is not None and left() <= 0:
        raise UserError("no time is left; give more budget.minutes")


def _measured_gain(
    engine: Engine,
    folder: Path,
    draft: Path,
    layout: str,
    drafter: Drafter,
    target: Target,
    gguf: Path,
    prompts: Sequence[Sequence[int]],
    gamma: int,
    limit: int,
    left: Callable[[], float] | None,
    commands: Sequence[str],
) -> EngineGain:
    """Both servers run at once, and answer in turn: one that waits takes no time of the other."""
    served = TargetToServe(model=str(gguf.resolve()), name=target.name, dtype="auto")
    exported = DraftToServe(draft.resolve(), drafter.config.name, layout, gamma)
    # a speculation step reads γ + 1 tokens at once, also beyond the end
    longest = max(map(len, prompts)) + limit + gamma + 1
    options = engine.draft_options(exported) + engine.room_options(longest)
    several = engine.room_options(longest, at_once=gamma + 1)  # to time a verification
    starts = STARTS if left is None else min(STARTS, max(1.0, left()))
    with (
        local_server(engine, served, options, folder / "engine.log", starts) as drafting,
        local_server(engine, served, several, folder / "engine-plain.log", starts) as plain,
    ):
        _require_time(left)
        with_draft = MeasuredServer(drafting, target, speculates=True)
        alone = MeasuredServer(plain, target, speculates=False)
        v = cost_of_verifying(alone, prompts[0], gamma)
        drafted, plainly = responses_in_turn(with_draft, alone, prompts, limit, left)
        return gain_of(
            with_draft,
            drafted,
            plainly,
            weights=file_type_name(read_keys(gguf).get(FILE_TYPE)),
            gamma=gamma,
            limit=limit,
            v=v,
            commands=commands,
        )


def _serve(engine: Engine, draft: Path, gamma: int, target: Target) -> str:
    command = f"scripts/serve --engine {engine.name} --draft {quote(str(draft))} --gamma {gamma}"
    own = TargetConfig().path  # of scripts/serve, unless another is given
    other = f" target=model target.path={quote(target.name)}"
    return command if target.name == own else command + other


def require_servable(name: str) -> None:
    """Raise UserError for an engine in which no run can be measured."""
    engine = ENGINES.named(name)
    require(
        engine.reads_gguf,
        f"serve_in={name}: a run starts and measures engines that read GGUF files, such as "
        f"llama.cpp; for {engine.title}, use scripts/serve and scripts/evaluate --engine",
    )

"""The last measurement of a run with `serve_in`: its draft in an engine on this machine, beside the
target alone in the same engine, on the prompts that were timed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote

from specdec.drafters.base import Drafter
from specdec.engines.engine_interface import DraftToServe, Engine, TargetToServe
from specdec.engines.known_engines import ENGINES
from specdec.engines.local_server import STARTS, local_server, require_installed
from specdec.errors import UserError, require
from specdec.formats.draft_export import export_path, write_export
from specdec.formats.gguf_file import FILE_TYPE, file_type_name, read_keys
from specdec.measure.engine_gain import EngineGain, cost_of_verifying, gain_of, responses_in_turn
from specdec.measure.served import MeasuredServer
from specdec.progress import console, tell
from specdec.targets.gguf import require_gguf
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
) -> EngineGain | None:
    """What the best draft of the run in `folder` gains in the engine of this name, in responses of
    at most `limit` tokens; None, and a line that says why, where it cannot be served there."""
    engine = ENGINES.named(name)
    try:
        layout, gguf = _servable(engine, drafter.config.name, cfg)
        _require_time(left)
        draft = export_path(folder, drafter.config.name, layout)
        write_export(draft, drafter, target, layout, folder / "best")
        console.print(f"exported to {draft} ({layout}); measuring in {engine.title}")
        return _measured_gain(
            engine, folder, draft, drafter.config.name, target, gguf, prompts, gamma, limit, left
        )
    except (UserError, OSError) as error:
        tell(f"not measured in {engine.title}: {error}")
        return None


def is_servable(name: str, family: str, cfg: TargetConfig) -> bool:
    """Whether `gain_in_engine` can serve a draft of this family here."""
    try:
        _servable(ENGINES.named(name), family, cfg)
    except UserError:
        return False
    return True


def _servable(engine: Engine, family: str, cfg: TargetConfig) -> tuple[str, Path]:
    """The layout of the draft's export and the target's file for the engine. Raises UserError if it
    cannot serve them, or is not installed."""
    gguf, layout = require_gguf(cfg.path, cfg.adapter, engine.title), engine.layouts.get(family)
    if layout is None:
        raise UserError(f"it has no method for a draft of {family}")
    require_installed(engine)
    return layout, gguf


def _require_time(left: Callable[[], float] | None) -> None:
    if left is not None and left() <= 0:
        raise UserError("no time is left; give more budget.minutes")


def _measured_gain(
    engine: Engine,
    folder: Path,
    draft: Path,
    family: str,
    target: Target,
    gguf: Path,
    prompts: Sequence[Sequence[int]],
    gamma: int,
    limit: int,
    left: Callable[[], float] | None,
) -> EngineGain:
    """Both servers run at once, and answer in turn: one that waits takes no time of the other."""
    served = TargetToServe(model=str(gguf.resolve()), name=target.name, dtype="auto")
    layout = engine.layouts[family]
    options = engine.draft_options(DraftToServe(draft.resolve(), family, layout, gamma))
    several = engine.parallel_options(gamma + 1)  # to time a verification
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
            commands=[_serve(engine, draft, gamma, target)],
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

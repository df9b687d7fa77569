"""The table of engines by name, and the recognition of a server's engine.

Another package adds an engine with an entry point of the group `draftsmith.engines` that names an
instance of its `Engine`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.engines.client import RequestRejected, Server, ServerUnavailable
from specdec.engines.engine_interface import Engine
from specdec.engines.llama_cpp import LlamaCpp
from specdec.engines.sglang import SGLang
from specdec.engines.vllm import Vllm
from specdec.errors import UserError, require
from specdec.plugins import Plugins


def require_engine(name: str, value: Any) -> None:
    """Raise UserError for an entry that is not an engine of this name."""
    fits = isinstance(value, Engine) and value.name == name
    require(fits, f"it is no instance of an Engine whose name is {name!r}")


CORE = {"vllm": Vllm(), "llama.cpp": LlamaCpp(), "sglang": SGLang()}
ENGINES = Plugins[Engine]("draftsmith.engines", "engine", CORE, require_engine)
DEFAULT_ENGINE = "vllm"  # also for a server that no engine recognises


@dataclass(frozen=True)
class ServedModel:
    """A server's name for the model that it serves, the maximum number of tokens of a text, and its
    engine."""

    name: str
    room: int | None
    engine: Engine


def engine_of(owner: Any) -> Engine:
    """The engine with this value of `owned_by` in its list of models: one of the core, the lab or
    an installed package, else the default."""
    if not any(owner in engine.owners for engine in ENGINES.values()):
        ENGINES.add_installed()
    recognised = (engine for engine in ENGINES.values() if owner in engine.owners)
    return next(recognised, ENGINES[DEFAULT_ENGINE])


def model_of(server: Server, wanted: Sequence[str]) -> ServedModel:
    """The model of a server: its only one, or the one whose name or path is among `wanted`. Raises
    UserError if the server does not answer, or serves several models under other names."""
    try:
        models = server.get("/models")["data"]
        names = [str(model["id"]) for model in models]
    except (RequestRejected, ServerUnavailable) as error:
        raise UserError(
            f"no engine answers at {server.url} ({error}): start one there (docs/engines.md), or "
            "give its address"
        ) from error
    except (TypeError, KeyError) as error:
        raise UserError(f"{server.url} lists no models, as OpenAI's interface has it") from error
    own = [m for m in models if {m["id"], m.get("root")} & {*wanted}]
    if len(models) == 1:
        own = list(models)
    require(
        len(own) == 1,
        f"{server.url} serves {', '.join(names) or 'no model'}: serve the target alone, or under "
        f"the name {wanted[0]}",
    )
    engine = engine_of(own[0].get("owned_by"))
    return ServedModel(str(own[0]["id"]), engine.longest_text(own[0]), engine)

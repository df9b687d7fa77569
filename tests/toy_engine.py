"""A second engine, unlike vLLM: it has an address, fields and figures of its own, and no hidden
states. `FakeEngine(toy=True)` in tests/engine.py is its server."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.engines.client import Server, ServerUnavailable
from specdec.engines.engine_interface import (
    Completion,
    CompletionRequest,
    DraftToServe,
    Engine,
    SpeculationCounts,
    TargetToServe,
)


class Toy(Engine):
    name, title, owners = "toy", "Toy", ("toy",)
    layouts = {"eagle3": "hf"}
    install = "install Toy"

    def environment(self, scripts: Path) -> Mapping[str, str]:
        return {"TOY": "1"}

    def serve_command(
        self, python: Path, target: TargetToServe, host: str, port: int, options: Sequence[str]
    ) -> list[str]:
        return [str(python), "toy-server", target.model, f"{host}:{port}", *options]

    def draft_options(self, draft: DraftToServe) -> list[str]:
        return ["--head", str(draft.folder), "--tokens", str(draft.gamma)]

    def shown_commands(
        self,
        drafter: str,
        draft: str,
        target: str,
        gamma: int,
        overrides: str | None,
        options: Sequence[str] = (),
    ) -> tuple[str, ...]:
        return (f"toy-server {target} --head {draft} --tokens {gamma}",)

    def completion_url(self, server: Server) -> str:
        return f"{server.root}/completion"

    def completion_body(self, request: CompletionRequest) -> dict[str, Any]:
        if request.states is not None:
            raise self.no_states()
        return {
            "prompt": list(request.prompt),
            "limit": request.limit,
            "ends": list(request.eos or ()),
            "temperature": request.sampler.temperature,
            "seed": request.seed,
        }

    def completion(self, reply: Any) -> Completion:
        if "tokens" not in reply:
            raise ServerUnavailable("a response without tokens")
        return Completion(reply["tokens"], None, finish_reason=reply["why"])

    def longest_text(self, model: Mapping[str, Any]) -> int | None:
        return int(model["meta"]["room"])

    def speculation_counts_of(self, reply: Any, server: Server) -> SpeculationCounts:
        """Only what was accepted is counted: every other token but the first is a step's own."""
        accepted = reply["kept"]
        return SpeculationCounts(len(reply["tokens"]) - 1 - accepted, accepted)


ENGINE = Toy()

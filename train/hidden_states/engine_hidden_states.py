"""Fills a store with the hidden states of engines that serve the target."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from specdec.engines.client import Server
from specdec.engines.engine_interface import CompletionRequest
from specdec.engines.server_pool import Failed, NamedRequest, ServerPool
from specdec.errors import UserError, require
from specdec.progress import TOKENS, console
from specdec.sampling.sampler import Sampler
from specdec.targets.loading import TargetLoader
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from train.data.engine_responses import (
    AT_ONCE,
    SECONDS,
    CheckedServerResults,
    hidden_states_of,
    require_room_in,
    require_same_states,
    servers_of,
)
from train.data.sequences import Row
from train.hidden_states.store import HiddenStateStore, documents

REQUESTS = 64  # at once
LEAST = 0.5  # share of an engine's next tokens, one after each text, that its states must give


@dataclass(frozen=True)
class DocumentStates:
    """A server's output for a text: the states [T, D] after some layers, and the next token."""

    states: Sequence[Tensor]
    after: int
    server: Server


def fill_from_engines(
    store: HiddenStateStore,
    rows: Sequence[Row],
    urls: Sequence[str],
    on_demand: TargetLoader,
    bars: Progress,
) -> None:
    """Store the hidden states of all documents of rows, computed by engines. Raises UserError if a
    document cannot be read, and if the states are not those of this target: the first ones of each
    server, and some later ones, are compared with the target's own."""
    target = on_demand.parts
    texts = {
        i: x for i, x in enumerate(row.ids[at].tolist() for row in rows for at in documents(row))
    }
    store.prepare(sum(map(len, texts.values())))
    engines = servers_of("hidden_states.from", urls, target)
    require_room_in(engines, max(map(len, texts.values())) + 1)
    console.print(f"hidden states from {engines.title}")
    task = bars.add_task("engine's hidden states", total=sum(map(len, texts.values())), unit=TOKENS)
    written, whole = time.monotonic(), list[Target]()

    def compare(_: Server, read: Mapping[int, DocumentStates]) -> None:
        with torch.no_grad():
            said = [
                int(target.logits(hidden_states_of(x.states, target)[0][0, -1]).argmax()) == x.after
                for x in read.values()
            ]
        _require_own(said, target)
        if not whole:
            whole.append(on_demand.to_compare())
        states = [(texts[i], x.states) for i, x in read.items()]
        require_same_states(whole[0], store.kind.layers, states)

    def store_states(_: Server, i: int, read: DocumentStates) -> None:
        nonlocal written
        store.hold_document(texts[i], *hidden_states_of(read.states, target), target)
        if time.monotonic() - written > SECONDS or store.unwritten > AT_ONCE:
            store.write()
            written = time.monotonic()

    def remove_states(_: Server, names: Sequence[int]) -> None:
        store.remove([texts[i] for i in names])

    results = CheckedServerResults[int, DocumentStates](compare, store_states, remove_states)
    try:
        for i, result in states_of_documents(
            engines, texts, [*store.kind.layers, target.depth], target.width
        ):
            if isinstance(result, Failed):
                raise UserError(
                    f"the hidden states of a text of {len(texts[i])} tokens are missing because of "
                    f"{result.reason}: mend that and run the same command again; what was stored "
                    "before is kept"
                )
            results.take(result.server, i, result)
            bars.advance(task, len(texts[i]))
        results.finish()
    finally:
        store.write()
    bars.remove_task(task)


def states_of_documents(
    engines: ServerPool, texts: dict[int, list[int]], layers: Sequence[int], width: int
) -> Any:
    """The states after these layers [T, D] of each text, and the engine's next token, in the order
    of arrival."""
    requests = [
        NamedRequest(i, CompletionRequest(ids, 1, Sampler(0.0), seed=0, states="prompt"))
        for i, ids in texts.items()
    ]

    def parsed(i: int, reply: Any, server: Server) -> DocumentStates:
        engine = engines.engine_at(server)
        after = engine.completion(reply).ids or [-1]
        return DocumentStates(
            engine.hidden_states(reply, texts[i], layers, width), after[0], server
        )

    return engines.results(requests, REQUESTS, parsed)


def _require_own(alike: Sequence[bool], target: TargetParts) -> None:
    require(
        sum(alike) >= LEAST * len(alike),
        f"after {len(alike)} texts, the engine's next token is only {sum(alike)} times the one "
        f"that {target.name} makes of its states: it serves another model: serve the checkpoint of "
        "target.path",
    )

"""Fills a store with the hidden states of engines that serve the target."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from specdec.engines.client import COMPLETIONS, Engines, Failed, Request, choice_of, sampling
from specdec.engines.states import states_of
from specdec.errors import UserError, require
from specdec.progress import console
from specdec.sampling.sampler import Sampler
from specdec.targets.parts import Parts
from train.data.engines import (
    AT_ONCE,
    COMPARED,
    SECONDS,
    engines_of,
    features_of,
    require_room_in,
)
from train.data.packing import Row
from train.features.source import documents
from train.features.store import Store

REQUESTS = 64  # at once
LEAST = 0.5  # share of an engine's next tokens, one after each text, that its states must give


def fill(
    store: Store, rows: Sequence[Row], urls: Sequence[str], target: Parts, progress: Progress
) -> None:
    """Store the features of all documents of rows, which engines read. Raises UserError if a
    document cannot be read, and if the states are not those of this target."""
    texts = {
        i: x for i, x in enumerate(row.ids[at].tolist() for row in rows for at in documents(row))
    }
    store.prepare(sum(map(len, texts.values())))
    engines = engines_of("features.from", urls, target)
    require_room_in(engines, max(map(len, texts.values())) + 1)
    console.print(f"features from {engines.title}")
    task = progress.add_task("engine's features", total=sum(map(len, texts.values())))
    written, alike, compared = time.monotonic(), list[bool](), False
    try:
        for i, result in states(engines, texts, [*store.kind.layers, target.depth], target.width):
            if isinstance(result, Failed):
                raise UserError(
                    f"the features of a text of {len(texts[i])} tokens are missing because of "
                    f"{result.reason}: mend that and run the same command again; what was stored "
                    "before is kept"
                )
            final_1TD, layers_1TF = features_of(result[0], target)
            if not compared:
                with torch.no_grad():
                    said = int(target.logits(final_1TD[0, -1]).argmax())
                alike.append(said == result[1])
                if len(alike) == min(COMPARED, len(texts)):
                    _require_own(alike, target)
                    compared = True
            store.keep(texts[i], final_1TD, layers_1TF, target)
            late = time.monotonic() - written > SECONDS or store.unwritten > AT_ONCE
            if compared and late:
                store.write()
                written = time.monotonic()
            progress.advance(task, len(texts[i]))
    except UserError:
        if compared:
            store.write()
        raise
    store.write()
    progress.remove_task(task)


def states(engines: Engines, texts: dict[int, list[int]], layers: Sequence[int], width: int) -> Any:
    """The states after these layers [T, D] of each text, and the token that the engine would write
    next, in the order in which they come."""
    how = {"max_tokens": 1, "return_token_ids": True, "kv_transfer_params": {}}
    how |= sampling(Sampler(0.0), 0)
    requests = [Request(i, COMPLETIONS, {"prompt": ids, **how}) for i, ids in texts.items()]

    def read(i: int, reply: Any) -> tuple[list[Tensor], int]:
        after = choice_of(reply).get("token_ids") or [-1]
        return states_of(reply, texts[i], layers, width), after[0]

    return engines.results(requests, REQUESTS, read)


def _require_own(alike: Sequence[bool], target: Parts) -> None:
    require(
        sum(alike) >= LEAST * len(alike),
        f"after {len(alike)} texts, the engine's next token is only {sum(alike)} times the one "
        f"that {target.name} makes of its states: it serves another model: serve the checkpoint of "
        "target.path",
    )

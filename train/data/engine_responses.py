"""Responses written by engines. Prompts and responses are token ids, so nothing is tokenised twice.
A text from a server without ids is accepted only if tokenising prompt and response together begins
with the prompt's ids."""

import json
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import uuid4

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.progress import Progress
from torch import Tensor

from specdec.context import HiddenStateSpec
from specdec.engines.client import RequestRejected, Server, ServerUnavailable
from specdec.engines.engine_interface import Completion, CompletionRequest
from specdec.engines.server_pool import Failed, NamedRequest, ServerPool
from specdec.errors import UserError, require
from specdec.files import make_folder, write_whole
from specdec.integrity import sealed
from specdec.progress import console, tell
from specdec.ranks import Ranks
from specdec.sampling.sampler import Sampler
from specdec.targets.loading import TargetLoader
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from train.accelerated import ranks_of
from train.budget import StageTime
from train.data.response_files import (
    WITHOUT_RESPONSE,
    ResponsesConfig,
    ResponsesRead,
    StoredResponses,
    name_of,
    read_stored_responses,
    response_documents,
    responses_key,
    seed_of,
    without_response,
)
from train.data.sequences import Document, Prompt
from train.hidden_states.store import HiddenStateStore
from train.shards import shard_of

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
COMPARED = 8  # results of a server that are compared with the target's before any is kept
AGAIN = 256  # results of a server that are kept before its next ones are compared again
NEAR_TIES = 2  # greedy tokens that may differ, however few there are
# relative error of hidden states, in the median over tokens, that rounding alone may give
ROUNDING = {torch.float32: 0.01}
ROUNDING_16 = 0.1
GREEDY = 0.9  # share of greedy tokens that are at least its likeliest; rounding flips near-ties
# hidden states of responses are written after so many seconds or bytes
SECONDS, AT_ONCE = 2.0, 32 * 2**20


@dataclass(frozen=True)
class EngineResponse:
    """A response's ids, its server and, if requested, the states [T, D] after some layers, for the
    prompt and the response without its last token."""

    ids: list[int]
    server: Server
    states: Sequence[Tensor] = ()


class CheckedServerResults(Generic[K, T]):
    """Results of several servers, kept only after the server was compared with the target: the
    first `COMPARED` results of each server, and as many again after every `AGAIN`. `compare` raises
    UserError for results that are not the target's; then `drop` gets the results of that server
    since its last comparison."""

    def __init__(
        self,
        compare: Callable[[Server, Mapping[K, T]], None],
        keep: Callable[[Server, K, T], None],
        drop: Callable[[Server, Sequence[K]], None],
    ) -> None:
        self._compare, self._keep, self._drop = compare, keep, drop
        self._held: dict[Server, dict[K, T]] = {}  # not compared yet
        self._since: dict[Server, list[K]] = {}  # kept since the last comparison

    def take(self, server: Server, name: K, result: T) -> None:
        since = self._since.get(server)
        if since is not None and len(since) < AGAIN:
            since.append(name)
            self._keep(server, name, result)
            return
        held = self._held.setdefault(server, {})
        held[name] = result
        if len(held) == COMPARED:
            self._settle(server)

    def finish(self) -> None:
        """Compare the results still held, however few."""
        for server in [*self._held]:
            self._settle(server)

    def _settle(self, server: Server) -> None:
        held = self._held.pop(server)
        try:
            self._compare(server, held)
        except UserError as error:
            since = self._since.pop(server, [])
            self._drop(server, since)
            dropped = f"; what it gave since it was last compared ({len(since)}) is dropped"
            raise UserError(f"{server.url}: {error}{dropped if since else ''}") from error
        self._since[server] = []
        for name, result in held.items():
            self._keep(server, name, result)


def servers_of(setting: str, urls: Sequence[str], target: TargetParts) -> ServerPool:
    """The servers at these addresses. Raises UserError as `ServerPool` does."""
    wanted = [target.name, Path(target.name).name]
    return ServerPool([Server.at_address(setting, url) for url in urls], wanted)


def require_room_in(engines: ServerPool, longest: int) -> None:
    """Raise UserError if a text of this many tokens is too long for an engine."""
    if engines.room is None or longest <= engines.room:
        return
    raise UserError(
        f"{engines.title}: a prompt and its response take up to {longest} tokens, and the engine "
        f"takes {engines.room}: serve with {engines.length_option} {longest}, or lower "
        "data.max_prompt or responses.max_new_tokens"
    )


def responses_of(
    engines: ServerPool,
    target: TargetParts,
    asked: Mapping[str, Sequence[int]],
    seeds: Mapping[str, int],
    sampler: Sampler,
    limit: int,
    at_once: int,
    layers: Sequence[int] | None = None,
    goes_on: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[str, EngineResponse | Failed]]:
    """The responses of at most `limit` tokens to prompts by their names, in the order of arrival,
    with the states after these `layers`. No prompt is sent after `goes_on` returns False. Raises
    UserError for a response that cannot be the target's, and as `ServerPool.results` does."""
    requests = [
        NamedRequest(
            name,
            CompletionRequest(
                prompt=prompt,
                limit=limit,
                sampler=sampler,
                seed=seeds[name],
                eos=target.eos,
                states=None if layers is None else "response",
                text_needed=True,
            ),
        )
        for name, prompt in asked.items()
    ]

    def parsed(name: str, reply: Any, server: Server) -> EngineResponse:
        engine = engines.engine_at(server)
        ids = ids_of(engine.completion(reply), asked[name], target, limit)
        if layers is None:
            return EngineResponse(ids, server)
        text = [*asked[name], *ids]
        return EngineResponse(ids, server, engine.hidden_states(reply, text, layers, target.width))

    return engines.results(requests, at_once, parsed, goes_on)


def ids_of(
    response: Completion, prompt: Sequence[int], target: TargetParts, limit: int
) -> list[int]:
    """The ids of a response, up to and including the first stop token, also if the engine strips
    it. Raises UserError if they cannot be the target's; RequestRejected if the response came as
    text and the prompt's ids are no prefix of the whole text's; ServerUnavailable if the reply has
    no response, or an incomplete one."""
    ids, reason = response.ids, response.finish_reason
    if ids is None and response.text is None:
        raise ServerUnavailable("a response without ids and without text")
    if reason not in ("stop", "length"):
        raise ServerUnavailable(f"a response that was broken off (finish_reason {reason!r})")
    require(
        response.prompt is None or response.prompt == list(prompt),
        "the engine read other tokens than were sent to it: it does not serve this target, or "
        "changes prompts: serve the checkpoint of target.path",
    )
    if ids is None:
        ids = _of_text(str(response.text), prompt, target)
    rows = target.vocab_size
    sound = isinstance(ids, list) and all(type(i) is int and 0 <= i < rows for i in ids)
    require(
        sound,
        f"the engine answered with ids outside the target's vocabulary of {rows}: it serves "
        "another model: serve the checkpoint of target.path",
    )
    stop = response.stop
    # the engine ended it by an id of its own, which it returns: the target would have gone on
    cut = type(stop) is int and ids[-1:] == [stop]
    if reason == "stop" and not {*ids} & {*target.eos} and not cut:  # it may not say by which id
        ids = [*ids, stop if type(stop) is int and stop in target.eos else _end_of(target)]
    ends = [n for n, i in enumerate(ids[:limit], 1) if i in target.eos]
    said: list[int] = ids[: ends[0] if ends else limit]
    if not said:
        raise ServerUnavailable("an empty response")
    return said


def _end_of(target: TargetParts) -> int:
    """The id that ends a response of the target. Raises UserError if there is none."""
    if target.response_end is None:
        raise UserError(
            f"the engine ends responses by a token that it does not return, and no file of "
            f"{target.name} says which: set eos_token_id in its generation_config.json"
        )
    return target.response_end


def _of_text(text: str, prompt: Sequence[int], target: TargetParts) -> list[int]:
    """The ids of a response that came as text, which may lack the id that ends it."""
    tokenizer = target.tokenizer
    before = tokenizer.decode(prompt, skip_special_tokens=False)
    whole = tokenizer(before + text, add_special_tokens=False)["input_ids"]
    if whole[: len(prompt)] != list(prompt):
        raise RequestRejected(
            "an engine that returns text instead of token ids, and this text's ids do not begin "
            "with the prompt's"
        )
    ids: list[int] = whole[len(prompt) :]
    return ids


@torch.no_grad()
def hidden_states_of(states: Sequence[Tensor], target: TargetParts) -> tuple[Tensor, Tensor | None]:
    """The final state [1, T, D] and the layers [1, T, F], from an engine's states after layers. The
    last of these is the state after all layers, before the final norm."""
    *layers, last = (x[None].to(target.device, target.dtype) for x in states)
    return target.normed(last), torch.cat(layers, -1) if layers else None


@torch.no_grad()
def final_of(target: Target, prompt: Sequence[int], response: EngineResponse) -> Tensor:
    """The target's own final states [N, D] before each token of a response."""
    ids_BT = torch.tensor([[*prompt, *response.ids]], device=target.device)
    _, final_1TD = target.hidden_states(ids_BT, HiddenStateSpec())
    return final_1TD[0, len(prompt) - 1 :][: len(response.ids)]


@torch.no_grad()
def require_same_states(
    target: Target,
    layers: Sequence[int],
    read: Sequence[tuple[Sequence[int], Sequence[Tensor]]],
) -> None:
    """Raise UserError unless the states [T, D] of an engine, after these `layers` and after all
    layers, equal the target's own up to rounding. Comparing tokens does not suffice: another model
    may have the same embedding, final norm and head, and then its tokens are consistent with its
    states."""
    places = [*layers, len(target.layers)]
    errors: list[list[Tensor]] = [[] for _ in places]
    for text, states in read:
        ids_BT = torch.tensor([list(text)[: len(states[0])]], device=target.device)
        ctx, final_1TD = target.hidden_states(ids_BT, HiddenStateSpec(tuple(layers)))
        theirs_1TD, theirs_1TF = hidden_states_of(states, target)
        pairs = [(theirs_1TD, final_1TD)]
        if theirs_1TF is not None and ctx.layers_BTF is not None:
            shape = (len(layers), -1)
            both = (x.unflatten(-1, shape).unbind(-2) for x in (theirs_1TF, ctx.layers_BTF))
            pairs = [*zip(*both, strict=True), *pairs]
        for error, (theirs, ours) in zip(errors, pairs, strict=True):
            ours_TD, theirs_TD = ours[0].float(), theirs[0].float()
            error.append((theirs_TD - ours_TD).norm(dim=-1) / ours_TD.norm(dim=-1).clamp_min(1e-9))
    most = ROUNDING.get(target.dtype, ROUNDING_16)
    for place, error in zip(places, errors, strict=True):
        median = float(torch.cat(error).median())
        require(
            median <= most,
            f"the engine's hidden states after layer {place} differ from those of {target.name} by "
            f"a relative error of {median:.2f}: the engine serves another model, or one that is "
            "quantised otherwise: serve the checkpoint of target.path",
        )


@torch.no_grad()
def require_same_model(
    target: TargetParts, read: Sequence[tuple[Tensor, Sequence[int]]], sampler: Sampler
) -> None:
    """Raise UserError unless responses of engines are consistent with the target, given its final
    states [N, D] before their tokens: greedy tokens must be its most likely ones, except near-ties,
    and sampled ones as likely as its own samples."""
    likeliest, surprise, spread, count = 0, 0.0, 0.0, 0
    for final_ND, response in read:
        said_N = torch.tensor(response, device=target.device)
        logits_NV = target.logits(final_ND).double()
        likeliest += int((logits_NV.argmax(-1) == said_N).sum())
        count += len(said_N)
        if sampler.temperature > 0:
            log_p_NV = (logits_NV / sampler.temperature).log_softmax(-1)
            own_N = -log_p_NV.gather(-1, said_N[:, None])[:, 0]
            mean_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
            surprise += float((own_N - mean_N).sum())
            spread += float(((log_p_NV.exp() * log_p_NV.square()).sum(-1) - mean_N.square()).sum())
    if sampler.temperature == 0:
        require(
            likeliest >= min(GREEDY * count, count - NEAR_TIES),
            f"of {count} tokens that the engine wrote greedily, only {likeliest} are the likeliest "
            f"ones of {target.name}: the engine serves another model, or one that is quantised "
            "otherwise: serve the checkpoint of target.path",
        )
    elif surprise > 5 * math.sqrt(spread) + 0.1 * count:  # five standard deviations, and rounding
        raise UserError(
            f"the {count} tokens that the engine drew are less likely than {target.name} would "
            f"draw them (by {surprise / count:.2f} nats each): the engine serves another model: "
            "serve the checkpoint of target.path"
        )


def responses_of_engines(
    target: TargetLoader,
    prompts: Sequence[Prompt],
    cfg: ResponsesConfig,
    accelerator: Accelerator,
    progress: Progress,
    keep: HiddenStateStore | None,
    responses_read: ResponsesRead | None = None,
    clock: StageTime | None = None,
) -> list[Document]:
    """`documents_with_responses` by engines that serve the target. With `keep`, they also compute
    the hidden states of the responses that they write now. Prompts without a response are skipped.
    Raises UserError if a response is not the target's."""
    key, ranks = responses_key(target.parts, cfg, served=True), ranks_of(accelerator)
    folder = make_folder(Path(cfg.root) / key)
    share = shard_of("responses.shard", cfg.shard)
    mine = prompts if share is None else share.part(prompts)
    asked = {name_of(prompt): prompt.ids.tolist() for prompt in mine}

    def recorded() -> dict[str, str]:
        return {} if responses_read is None else responses_read.files(key)

    def stored_responses(recorded: Mapping[str, str], own: Collection[str] = ()) -> StoredResponses:
        return read_stored_responses(folder, key, target.parts.vocab_size, asked, recorded, own)

    def known_now() -> tuple[set[str], set[str]]:
        """The prompts with a response, and those not to be sent to engines."""
        stored = stored_responses(recorded())
        names = {*stored.by_prompt, *without_response(folder, key)}
        if stored.damage and not names >= asked.keys():
            tell(f"{stored.damage}: their prompts are answered again where this run needs them")
        return set(stored.by_prompt), names

    (known, before), files = ranks.first(known_now), list[str]()
    if not before >= asked.keys():
        if clock is not None:
            asked = dict(sorted(asked.items()))
            clock.floor = math.ceil(max(0, clock.floor - len(known & asked.keys())) / ranks.world)
        files = _ask(target, asked, before, cfg, folder, key, keep, ranks, progress, clock)
        accelerator.wait_for_everyone()
    own = gather_object(files)

    def documents() -> list[Document]:
        stored = stored_responses(
            {name: file for name, file in recorded().items() if name in known}, own
        )
        left_out = without_response(folder, key) - stored.by_prompt.keys()
        if clock is not None:
            left_out |= asked.keys() - stored.by_prompt.keys()
        answered = [p for p in prompts if name_of(p) not in left_out]
        read_now = response_documents(answered, stored.by_prompt, None, folder)
        if responses_read is not None:
            responses_read.record(key, {n: f for n, f in stored.files.items() if n in asked})
        return read_now

    return ranks.handed(documents) if share is None else []


def _ask(
    target: TargetLoader,
    asked: Mapping[str, Sequence[int]],
    known: Collection[str],
    cfg: ResponsesConfig,
    folder: Path,
    key: str,
    keep: HiddenStateStore | None,
    ranks: Ranks,
    progress: Progress,
    clock: StageTime | None = None,
) -> list[str]:
    """Generate responses with engines for this process's share of the prompts that are not `known`;
    returns the names of the files written. The first responses of each server, and some later ones,
    are compared with the target. From then on, each is written when it arrives, so only running
    requests are lost if the process is killed; with hidden states, which are written before their
    responses, also those of the last two seconds. Prompts without a response are recorded at the
    end and not sent again, unless no engine responds any more. Prompts rejected before another
    mistake are also recorded, if an earlier run had responses."""
    mine = [name for name in asked if name not in known][ranks.rank :: ranks.world]
    parts = target.parts
    client = servers_of("responses.from", cfg.engines, parts)
    require_room_in(client, max(map(len, asked.values())) + cfg.longest_response)
    sampler = cfg.sampler
    console.print(f"responses{' and hidden states' if keep else ''} from {client.title}")
    if keep and mine and clock is not None:
        keep.prepare(0)
    elif keep and mine:
        keep.prepare_for_responses([asked[name] for name in mine], cfg.longest_response)
    task = progress.add_task("engine's responses", total=len(mine))
    failed, written = dict[str, Failed](), time.monotonic()
    # each server writes to a file of its own, and to a new one after each comparison
    current, files = dict[Server, str](), list[str]()
    accepted: dict[str, dict[str, list[int]]] = {}  # by the name of their file, to be written
    whole, kept = list[Target](), dict[str, list[int]]()

    def write() -> None:
        nonlocal written
        if keep:
            keep.write()
        for file_name, responses in accepted.items():
            lines = [json.dumps(sealed({"prompt": n, "ids": x}, key)) for n, x in responses.items()]
            if file_name not in files:
                files.append(file_name)
            with (folder / file_name).open("ab", buffering=0) as file:
                file.write("".join(f"{line}\n" for line in lines).encode())
        accepted.clear()
        written = time.monotonic()

    def accept(server: Server, name: str, response: EngineResponse) -> None:
        if keep:
            kept[name] = [*asked[name], *response.ids]
            keep.hold_document(kept[name], *hidden_states_of(response.states, parts), parts)
        accepted.setdefault(current[server], {})[name] = response.ids
        late = time.monotonic() - written > SECONDS or (keep and keep.unwritten > AT_ONCE)
        if not keep or late:
            write()

    def compare(server: Server, responses: Mapping[str, EngineResponse]) -> None:
        """Raise UserError unless these responses of a server are the target's."""
        if not whole:
            whole.append(target.to_compare())
        texts = [(asked[name], response) for name, response in responses.items()]
        if keep:
            states = [([*prompt, *response.ids], response.states) for prompt, response in texts]
            require_same_states(whole[0], keep.kind.layers, states)
        read = [(final_of(whole[0], prompt, response), response.ids) for prompt, response in texts]
        require_same_model(parts, read, sampler)
        current[server] = f"{uuid4().hex}.jsonl"

    def drop(server: Server, names: Sequence[str]) -> None:
        """Remove everything that this process has written for a server since its last
        comparison."""
        if (file_name := current.get(server)) is not None:
            accepted.pop(file_name, None)
            (folder / file_name).unlink(missing_ok=True)
            if file_name in files:
                files.remove(file_name)
        if keep:
            keep.remove([kept[name] for name in names])

    results = CheckedServerResults[str, EngineResponse](compare, accept, drop)

    def note(failed: Mapping[str, Failed]) -> None:
        """Record prompts without a response, so that they are not sent again."""
        if not failed:
            return
        lines = [
            json.dumps(sealed({"prompt": name, "reason": x.reason}, key))
            for name, x in failed.items()
        ]
        path = folder / f"{uuid4().hex}{WITHOUT_RESPONSE}"
        write_whole(path, "".join(f"{line}\n" for line in lines))
        tell(
            f"{len(failed)} of {len(mine)} prompts were not answered and are left out, the first "
            f"because of {next(iter(failed.values())).reason}; to ask them again, delete {path}"
        )

    layers = None if keep is None else [*keep.kind.layers, parts.depth]
    rows = max(1, cfg.at_once() // ranks.world)  # requests at once

    sent = 0

    def goes_on() -> bool:
        """Whether to send another prompt, given the time that prompts took so far."""
        nonlocal sent
        if clock is None:
            return True
        # each of `rows` running requests has taken as long as `rows` replies took to arrive
        ahead = clock.used * rows / clock.done if clock.done else 0.0
        more = clock.goes_on(min(ahead, clock.seconds / 4), clock.floor - sent + clock.done)
        sent += more
        return more

    prompts, seeds = (
        {name: asked[name] for name in mine},
        {name: seed_of(name, cfg) for name in mine},
    )
    how = sampler, cfg.longest_response, rows
    try:
        for name, response in responses_of(client, parts, prompts, seeds, *how, layers, goes_on):
            progress.advance(task, 1)
            if isinstance(response, Failed):
                failed[name] = response
            else:
                if clock is not None:
                    clock.finish(1)
                results.take(response.server, name, response)
    except UserError:
        try:
            results.finish()  # results received before the mistake
        finally:
            write()
        if known:  # this engine has answered others, so these are at fault
            note({name: x for name, x in failed.items() if x.refused})
        raise
    results.finish()
    write()
    progress.remove_task(task)
    if failed:
        client.require_one()  # else it is the engine that failed, not these prompts
        reason = next(iter(failed.values())).reason
        require(len(failed) < len(asked), f"no prompt was answered, the first because of {reason}")
        note(failed)
    return files

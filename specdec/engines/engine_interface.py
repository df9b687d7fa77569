"""The interface of a serving engine: one subclass of `Engine` for each, in its own file.

An engine is a server with OpenAI's HTTP interface. The methods of this class use only that
interface. An engine overrides them for further features: token ids, hidden states, or figures of
speculation. `specdec/engines/known_engines.py` is the table of engines.

Two capabilities are optional. An engine without hidden states does not override `hidden_states` and
`states_options`, and both raise UserError. An engine that loads no draft has empty `layouts`.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from specdec.engines.client import RequestRejected, Server, ServerUnavailable
from specdec.errors import UserError
from specdec.sampling.sampler import Sampler

# values that an engine would otherwise take from its model's generation_config.json
PLAIN = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}


@dataclass(frozen=True)
class CompletionRequest:
    """A prompt to complete. `states` requests hidden states: of the prompt alone, or ("response")
    also of all tokens of the response but the last. `eos` are the ids that end a response;
    `text_needed` accepts a response without ids, too."""

    prompt: Sequence[int]
    limit: int  # tokens of the response
    sampler: Sampler
    seed: int
    eos: Sequence[int] | None = None
    states: str | None = None  # "prompt" or "response"
    text_needed: bool = False
    fresh: bool = False  # read the whole prompt, even if the engine has kept parts of it


@dataclass(frozen=True)
class Completion:
    """A response of an engine: its ids or, without ids, its text."""

    ids: Any  # a list of ids, unless the server is another model's
    text: str | None
    prompt: Any = None  # the ids that the engine read, if it says so
    finish_reason: Any = None  # "stop", "length", or that of a response that was broken off
    stop: Any = None  # the id that ended the response, if the engine says so


@dataclass(frozen=True)
class SpeculationCounts:
    """The number of an engine's speculation steps and of drafted tokens that they accepted: in
    total and, if it reports them, at each position, also beyond the end of a response."""

    steps: int
    accepted: int
    by_position: tuple[int, ...] = ()

    def since(self, before: "SpeculationCounts") -> "SpeculationCounts":
        """The difference to earlier counts."""
        earlier = (*before.by_position, *[0] * len(self.by_position))
        return SpeculationCounts(
            self.steps - before.steps,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.by_position, earlier, strict=False)),
        )


@dataclass(frozen=True)
class TargetToServe:
    """A target that an engine loads. `name` is its name in requests."""

    model: str  # a folder, a file, or a name on the Hub
    name: str
    dtype: str  # "auto" for a GGUF file that is served as it is
    revision: str | None = None
    trust_remote_code: bool = False
    has_cuda: bool = False
    template_args: Mapping[str, Any] = field(default_factory=dict)  # arguments of its chat template
    chat_template: str | None = None  # a file with another chat template


@dataclass(frozen=True)
class DraftToServe:
    """An exported draft to serve with, and the drafter's name and the layout from its mark."""

    folder: Path  # or a GGUF file
    drafter: str
    layout: str
    gamma: int
    overrides: str | None = None  # JSON: keys to add to the target's config


class Engine:
    """An engine. `name` is for the command line and `title` for messages. `owners` are the values
    of `owned_by` in its list of models, by which a server is recognised."""

    name: ClassVar[str]
    title: ClassVar[str]
    owners: ClassVar[tuple[str, ...]] = ()
    # the layout (specdec/formats) that the engine loads, by drafter
    layouts: ClassVar[Mapping[str, str]] = {}
    install: ClassVar[str] = "install the engine"  # remedy if it is missing
    reads_gguf: ClassVar[bool] = False  # loads target and draft from GGUF files
    length_option: ClassVar[str] = "--max-model-len"  # sets the longest text, in tokens
    # set the arguments of the chat template, as JSON, and the template's file; None: it has neither
    template_options: ClassVar[tuple[str, str] | None] = None
    # the last draft of a response ends before the token limit, where ours goes on to γ
    drafts_within_limit: ClassVar[bool] = False

    @property
    def has_hidden_states(self) -> bool:
        return type(self).states_options is not Engine.states_options

    # Serving

    def python(self, repository: Path) -> Path:
        """The Python, or another program, that runs the engine by default."""
        return repository / ".venv-serving" / "bin" / "python"

    def environment(self, scripts: Path) -> Mapping[str, str]:
        """Environment variables for the engine. `scripts` is the folder of the project's
        scripts."""
        return {}

    def serve_command(
        self, python: Path, target: TargetToServe, host: str, port: int, options: Sequence[str]
    ) -> list[str]:
        """The command that serves a target at an address, with further options: `draft_options`,
        `states_options`, and those of the user."""
        raise UserError(
            f"Draftsmith cannot start {self.title}: start it yourself (docs/engines.md)"
        )

    def speculative_config(self, drafter: str, draft: str, gamma: int) -> dict[str, Any]:
        """The engine's settings for drafting `gamma` tokens with a draft in this folder. Raises
        UserError if it has no method for this drafter."""
        raise UserError(f"{draft}: {self.title} has no method for a draft of {drafter}")

    def draft_options(self, draft: DraftToServe) -> list[str]:
        """The options of `serve_command` for serving with a draft. Raises UserError as
        `speculative_config` does."""
        raise UserError(f"{draft.folder}: {self.title} serves no drafts")

    def states_options(self, layers: Sequence[int], folder: Path) -> list[str]:
        """The options of `serve_command` for writing the hidden states after these layers to files
        in a folder. Raises UserError if the engine cannot."""
        raise self.no_states()

    def room_options(self, longest: int, at_once: int = 1) -> list[str]:
        """The options of `serve_command` with which so many texts of up to `longest` tokens, prompt
        and response together, fit at once."""
        return [self.length_option, str(longest)]

    def chat_options(
        self, template_args: Mapping[str, Any], chat_template: str | None
    ) -> list[str]:
        """The options with which a server renders chats by default: with these arguments of the
        chat template, and with the template in this file. Empty if the engine has none (see
        `template_options`): then requests carry the arguments."""
        if self.template_options is None:
            return []
        of_arguments, of_file = self.template_options
        options = [of_arguments, json.dumps(dict(template_args))] if template_args else []
        return options + ([] if chat_template is None else [of_file, chat_template])

    def remove_unread_states(self, folder: Path) -> None:
        """Remove the files of hidden states that an earlier server left in a folder."""

    def shown_commands(
        self,
        drafter: str,
        draft: str,
        target: str,
        gamma: int,
        overrides: str | None,
        options: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """The commands with which a user serves an exported draft of one of the drafters in
        `layouts`, for a report. `overrides` is the path of the keys to add to the target's config;
        `options` are further ones of the server, such as `chat_options`."""
        return ()

    # Requests

    def completion_url(self, server: Server) -> str:
        """The address of requests for a completion."""
        return f"{server.url}/completions"

    def completion_body(self, request: CompletionRequest) -> dict[str, Any]:
        """The body of a request, without the model. Raises UserError for hidden states that the
        engine does not provide."""
        if request.states is not None:
            raise self.no_states()
        return {
            "prompt": list(request.prompt),
            "max_tokens": request.limit,
            **self.sampling(request.sampler, request.seed),
        }

    def sampling(self, sampler: Sampler, seed: int) -> dict[str, Any]:
        """The sampling settings in a request's body."""
        cutoffs = {"top_p": sampler.top_p, "top_k": sampler.top_k or -1}
        return {"temperature": sampler.temperature, "seed": seed, **cutoffs, **PLAIN}

    def completion(self, reply: Any) -> Completion:
        """The response in a reply. Raises ServerUnavailable for a reply that has none."""
        choice = choice_of(reply)
        text = choice.get("text")
        return Completion(
            choice.get("token_ids"),
            text if isinstance(text, str) else None,
            choice.get("prompt_token_ids"),
            choice.get("finish_reason"),
            choice.get("stop_reason"),
        )

    def longest_text(self, model: Mapping[str, Any]) -> int | None:
        """The maximum number of tokens of a text, by an entry of the server's list of models."""
        room = model.get("max_model_len")
        return room if isinstance(room, int) else None

    def title_at(self, server: Server) -> str:
        """The engine, its version if it reports one, and its address."""
        return f"{self.title} at {server.url}"

    # What a server makes of words

    def tokens_of_text(self, server: Server, model: str, words: str) -> list[int] | None:
        """The ids that a server makes of words, without special tokens; None if the engine does not
        tell. Raises RequestRejected and ServerUnavailable as `Server.ask` does."""
        return None

    def tokens_of_chat(self, server: Server, model: str, words: str) -> list[int] | None:
        """The ids of a chat that holds these words of a user, with the generation prompt, as a
        server renders it by default; None if the engine does not tell. Raises as `tokens_of_text`
        does."""
        return None

    # Hidden states

    def hidden_states(
        self, reply: Any, text: Sequence[int], layers: Sequence[int], width: int
    ) -> list[Tensor]:
        """The states [T, D] in a reply after each of these layers, for the tokens of `text` or all
        but the last. The state after all layers is before the final norm. Raises UserError if they
        cannot be a target's of this width; ServerUnavailable for states that the engine has not
        finished writing."""
        raise self.no_states()

    def no_states(self) -> UserError:
        """The error for an engine without hidden states."""
        return UserError(
            f"hidden_states.from: {self.title} gives no hidden states: name an engine that does "
            "(docs/engines.md), or compute them here without hidden_states.from"
        )

    # Figures of speculation

    def require_drafting(self, server: Server) -> None:
        """Raise UserError for a server that visibly serves without a draft."""

    def speculation_counts_of(self, reply: Any, server: Server) -> SpeculationCounts | None:
        """The speculation counts in a reply; None if it has none. Raises UserError for counts that
        cannot be read."""
        return None

    def decoding_seconds_of(self, reply: Any) -> float | None:
        """The seconds from the first token of a reply's response to its last; None if the engine
        does not say so."""
        return None

    def speculation_so_far(self, server: Server) -> SpeculationCounts | None:
        """The server's counters since it started; None if it has none. Raises RequestRejected and
        ServerUnavailable as `Server.ask` does."""
        return None


def speculation_counters(page: str, engine: str) -> SpeculationCounts | None:
    """The counters of speculation in a page of /metrics, whose names begin with ENGINE:spec_decode;
    None if it has none. Those of several engines behind one address are added up."""
    named = rf"^{engine}:spec_decode_num_(\w+?)_total(?:\{{(.*)\}})? ([\d.e+]+)$"
    counts, by_position = Counter[str](), Counter[int]()
    for name, labels, value in re.findall(named, page, re.M):
        position, count = re.search(r'position="(\d+)"', labels), int(float(value))
        if name == "accepted_tokens_per_pos" and position:
            by_position[int(position[1])] += count
        else:
            counts[name] += count
    if not counts and not by_position:
        return None
    positions = range(1 + max(by_position, default=-1))
    deep = tuple(by_position[k] for k in positions)
    return SpeculationCounts(counts["drafts"], counts["accepted_tokens"], deep)


def choice_of(reply: Any) -> dict[str, Any]:
    """The response in a reply to a completion. Raises ServerUnavailable for a reply without one,
    such as a proxy's."""
    try:
        choice = reply["choices"][0]
    except (TypeError, KeyError, IndexError) as error:
        raise ServerUnavailable("a response that is not of OpenAI's form") from error
    if not isinstance(choice, dict):
        raise ServerUnavailable("a response that is not of OpenAI's form")
    return choice


def ids_of_reply(reply: Any, key: str = "tokens") -> list[int] | None:
    """The ids in a reply of an address that makes tokens; None if it has none."""
    ids = reply.get(key) if isinstance(reply, dict) else None
    sound = isinstance(ids, list) and all(type(i) is int for i in ids)
    return ids if sound else None


def version_at(server: Server, path: str, key: str) -> str | None:
    """The version under `key` in the JSON at a server's path; None if there is none."""
    try:
        return str(server.get(f"{server.root}{path}")[key])
    except (RequestRejected, ServerUnavailable, TypeError, KeyError):
        return None


def python_path_with(folder: Path) -> str:
    """PYTHONPATH with another folder in front."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])

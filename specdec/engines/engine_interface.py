"""What Draftsmith asks of a serving engine: one `Engine` for each, in a file of its own.

An engine is a server with OpenAI's interface over HTTP. The methods of this class speak that
interface and nothing else, so an engine overrides only where it has more: the ids of tokens, hidden
states, or figures of speculation. `specdec/engines/known_engines.py` is the table of engines.

Two capabilities are optional. An engine without hidden states leaves `hidden_states` and
`states_options` as they are, and both raise UserError. An engine that loads no draft leaves
`layouts` empty.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from specdec.engines.client import RequestRejected, Server, ServerUnavailable
from specdec.errors import UserError
from specdec.sampling.sampler import Sampler

# what an engine would else take from the generation_config.json of the model that it serves
PLAIN = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}


@dataclass(frozen=True)
class CompletionRequest:
    """A prompt to complete. `states` asks for hidden states, too: of the prompt alone, or
    ("response") also of all tokens of the response but the last. `eos` are the ids that end a
    response; `text_needed` says that a response without ids is of use, too."""

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
    """A response as an engine gave it: its ids or, if it gives none, its text."""

    ids: Any  # a list of ids, unless the server is another model's
    text: str | None
    prompt: Any = None  # the ids that the engine read, if it says so
    finish_reason: Any = None  # "stop", "length", or that of a response that was broken off
    stop: Any = None  # the id that ended the response, if the engine says so


@dataclass(frozen=True)
class SpeculationCounts:
    """How many speculation steps an engine made and how many drafted tokens they accepted:
    altogether and, if it says so, at each position, also beyond the end of a response."""

    steps: int
    accepted: int
    by_position: tuple[int, ...] = ()

    def since(self, before: "SpeculationCounts") -> "SpeculationCounts":
        """What was counted after `before`."""
        earlier = (*before.by_position, *[0] * len(self.by_position))
        return SpeculationCounts(
            self.steps - before.steps,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.by_position, earlier, strict=False)),
        )


@dataclass(frozen=True)
class TargetToServe:
    """A target as an engine is to load it. `name` is that by which requests name it."""

    model: str  # a folder, a file, or a name on the Hub
    name: str
    dtype: str
    revision: str | None = None
    trust_remote_code: bool = False
    has_cuda: bool = False
    template_args: Mapping[str, Any] = field(default_factory=dict)  # of its chat template
    chat_template: str | None = None  # a file with another chat template


@dataclass(frozen=True)
class DraftToServe:
    """An exported draft to serve with, and its mark: the drafter's name and the layout."""

    folder: Path
    drafter: str
    layout: str
    gamma: int
    overrides: str | None = None  # JSON: keys to add to the target's config


class Engine:
    """An engine. `name` is that of the command line and `title` that of messages. `owners` are the
    values of `owned_by` in its list of models, by which a server is recognised."""

    name: ClassVar[str]
    title: ClassVar[str]
    owners: ClassVar[tuple[str, ...]] = ()
    # of a drafter, the layout (specdec/formats) in which the engine loads a draft
    layouts: ClassVar[Mapping[str, str]] = {}
    install: ClassVar[str] = "install the engine"  # what to do where it is missing

    # Serving

    def python(self, repository: Path) -> Path:
        """The Python, or another program, that runs the engine unless a user names one."""
        return repository / ".venv-serving" / "bin" / "python"

    def environment(self, scripts: Path) -> Mapping[str, str]:
        """Variables to set for the engine. `scripts` is the folder of the project's scripts."""
        return {}

    def serve_command(
        self, python: Path, target: TargetToServe, host: str, port: int, options: Sequence[str]
    ) -> list[str]:
        """The command that serves a target at an address, with more options: `draft_options`,
        `states_options`, and those of the user."""
        raise UserError(
            f"Draftsmith cannot start {self.title}: start it yourself (docs/engines.md)"
        )

    def speculative_config(self, drafter: str, draft: str, gamma: int) -> dict[str, Any]:
        """How the engine is to draft `gamma` tokens with a draft in this folder. Raises UserError
        if it has no method for this drafter."""
        raise UserError(f"{draft}: {self.title} has no method for a draft of {drafter}")

    def draft_options(self, draft: DraftToServe) -> list[str]:
        """The options of `serve_command` that serve with a draft. Raises UserError as
        `speculative_config` does."""
        raise UserError(f"{draft.folder}: {self.title} serves no drafts")

    def states_options(self, layers: Sequence[int], folder: Path) -> list[str]:
        """The options of `serve_command` by which the engine writes the hidden states after these
        layers to files in a folder. Raises UserError if it cannot."""
        raise self.no_states()

    def chat_options(
        self, template_args: Mapping[str, Any], chat_template: str | None
    ) -> list[str]:
        """The options with which a server renders chats by default: with these arguments of the
        chat template, and with the template in this file. Empty if the engine has no such options:
        then requests carry the arguments."""
        return []

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
        """The lines by which a user serves an exported draft of one of the drafters in `layouts`,
        for a report. `overrides` is the path of the keys to add to the target's config; `options`
        are further ones of the server, such as `chat_options`."""
        return ()

    # Requests

    def completion_url(self, server: Server) -> str:
        """The address of requests for a completion."""
        return f"{server.url}/completions"

    def completion_body(self, request: CompletionRequest) -> dict[str, Any]:
        """The body of a request, without the model. Raises UserError for hidden states that the
        engine does not give."""
        if request.states is not None:
            raise self.no_states()
        return {
            "prompt": list(request.prompt),
            "max_tokens": request.limit,
            **self.sampling(request.sampler, request.seed),
        }

    def sampling(self, sampler: Sampler, seed: int) -> dict[str, Any]:
        """The settings of sampling in a body."""
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
        """How many tokens a text may have, by an entry of the server's list of models."""
        room = model.get("max_model_len")
        return room if isinstance(room, int) else None

    def title_at(self, server: Server) -> str:
        """The engine, its version if it tells it, and its address."""
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
        """The states [T, D] of a reply after each of these layers, for the tokens of `text` or all
        but the last. The state after all layers is that before the final norm. Raises UserError if
        they cannot be a target's of this width; ServerUnavailable for states that the engine began
        to write and did not finish."""
        raise self.no_states()

    def no_states(self) -> UserError:
        """The error for an engine without hidden states."""
        return UserError(
            f"hidden_states.from: {self.title} gives no hidden states: name an engine that does "
            "(docs/engines.md), or compute them here without hidden_states.from"
        )

    # Figures of speculation

    def require_drafting(self, server: Server) -> None:
        """Raise UserError for a server that is seen to serve without a draft."""

    def speculation_counts_of(self, reply: Any, server: Server) -> SpeculationCounts | None:
        """The figures that a reply gives for itself; None if it gives none. Raises UserError for
        figures that cannot be read."""
        return None

    def speculation_so_far(self, server: Server) -> SpeculationCounts | None:
        """The server's counters since it started; None if it has none. Raises RequestRejected and
        ServerUnavailable as `Server.ask` does."""
        return None


def choice_of(reply: Any) -> dict[str, Any]:
    """The response in a reply to a completion. Raises ServerUnavailable for a reply that has none,
    such as that of a proxy in the engine's place."""
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
    """The version that a server gives as `key` of the JSON at a path; None if it gives none."""
    try:
        return str(server.get(f"{server.root}{path}")[key])
    except (RequestRejected, ServerUnavailable, TypeError, KeyError):
        return None


def python_path_with(folder: Path) -> str:
    """PYTHONPATH with another folder in front."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])

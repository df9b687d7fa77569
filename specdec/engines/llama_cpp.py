"""llama.cpp: how its server is started, asked and measured.

Everything here is as in llama.cpp's tools/server, build 11549, whose options and fields are those
of `llama-server`. A user names their own `llama-server`; else `scripts/llama_server.py` runs
the server of the package `xllamacpp` with the same options, in an environment of its own
(scripts/llama-cpp-env). Target and draft are GGUF files.

The server returns the ids of a response and how many drafted tokens it accepted for it. How many
speculation steps it took, and what it accepted at each position, stands only in the counters of
/metrics. It gives no hidden states. It ends a response by the ids that its own file of the target
marks as ends, and takes no others.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.engines.client import RequestRejected, Server, ServerUnavailable
from specdec.engines.engine_interface import (
    Completion,
    CompletionRequest,
    DraftToServe,
    Engine,
    SpeculationCounts,
    TargetToServe,
    ids_of_reply,
    python_path_with,
    speculation_counters,
    version_at,
)
from specdec.errors import UserError, require
from specdec.sampling.sampler import Sampler

METHODS = {  # of a drafter, the value of --spec-type
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dflash2": "draft-dflash",
    "dspark": "draft-dspark",
}
SAMPLERS = ["temperature", "top_k", "top_p"]  # in the order of our sampler, and no other one
REASONS = {"eos": "stop", "word": "stop", "limit": "length"}  # of `stop_type`
UNKNOWN_BUILD = "b0-unknown"
ROUNDED = 10**6  # /metrics has six digits of a count
CONTEXT = 4096  # tokens of prompt and response, unless the user gives --ctx-size


class LlamaCpp(Engine):
    """llama.cpp's server."""

    name, title, owners = "llama.cpp", "llama.cpp", ("llamacpp",)
    layouts = dict.fromkeys(METHODS, "gguf")
    install = "run scripts/llama-cpp-env"
    reads_gguf = True
    length_option = "--ctx-size"
    template_options = "--chat-template-kwargs", "--chat-template-file"
    drafts_within_limit = True

    # Serving

    def python(self, repository: Path) -> Path:
        venv = os.environ.get("DRAFTSMITH_LLAMA_CPP_VENV", repository / ".venv-llama-cpp")
        return Path(venv) / "bin" / "python"

    def environment(self, scripts: Path) -> Mapping[str, str]:
        """Where Python finds scripts/llama_server.py."""
        return {"PYTHONPATH": python_path_with(scripts)}

    def serve_command(
        self, python: Path, target: TargetToServe, host: str, port: int, options: Sequence[str]
    ) -> list[str]:
        """One response at a time, and no prompt kept from one to the next. `python` is an
        interpreter with xllamacpp, or a llama-server. More threads than cores make llama.cpp a
        hundred times slower, so it gets as many as torch uses."""
        line = [str(python)]
        if python.name.startswith("python"):
            line += ["-m", "llama_server"]
        line += ["--model", target.model, "--alias", target.name]
        if target.dtype == "float32":
            line += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
            if "--model-draft" in options:
                line += ["--cache-type-k-draft", "f32", "--cache-type-v-draft", "f32"]
        line += [*self.room_options(CONTEXT), "--cache-ram", "0"]
        threads = str(torch.get_num_threads())
        line += ["--threads", threads, "--threads-batch", threads]
        line += ["--metrics", "--slots"]
        line += self.chat_options(target.template_args, target.chat_template)
        return [*line, "--host", host, "--port", str(port), *options]

    def speculative_config(self, drafter: str, draft: str, gamma: int) -> dict[str, Any]:
        """Options without their dashes. The draft goes on to γ however unsure it is."""
        if drafter not in METHODS:
            raise UserError(f"{draft}: llama.cpp has no method for a draft of {drafter}")
        how = {"model-draft": draft, "spec-type": METHODS[drafter], "spec-draft-n-max": gamma}
        return how | {"spec-draft-n-min": 0, "spec-draft-p-min": 0}

    def draft_options(self, draft: DraftToServe) -> list[str]:
        how = self.speculative_config(draft.drafter, str(draft.folder), draft.gamma)
        threads = str(torch.get_num_threads())
        return [*_options(how), "--threads-draft", threads, "--threads-batch-draft", threads]

    def room_options(self, longest: int, at_once: int = 1) -> list[str]:
        """--ctx-size is divided among the texts."""
        return ["--parallel", str(at_once), self.length_option, str(at_once * longest)]

    def shown_commands(
        self,
        drafter: str,
        draft: str,
        target: str,
        gamma: int,
        overrides: str | None,
        options: Sequence[str] = (),
    ) -> tuple[str, ...]:
        how = self.speculative_config(drafter, draft, gamma)
        more = f" {shlex.join(options)}" if options else ""
        return (f"llama-server --model {target}{more} \\", f"  {shlex.join(_options(how))}")

    # Requests

    def completion_url(self, server: Server) -> str:
        """Not OpenAI's: only this one returns ids."""
        return f"{server.root}/completion"

    def completion_body(self, request: CompletionRequest) -> dict[str, Any]:
        if request.states is not None:
            raise self.no_states()
        return {
            "prompt": list(request.prompt),
            "n_predict": request.limit,
            "return_tokens": True,
            "cache_prompt": False,
            **self.sampling(request.sampler, request.seed),
        }

    def sampling(self, sampler: Sampler, seed: int) -> dict[str, Any]:
        """Only the named samplers run: no penalty, no min-p, whatever the server's defaults are."""
        cutoffs = {"top_p": sampler.top_p, "top_k": sampler.top_k}
        return {
            "temperature": sampler.temperature,
            "seed": seed % 2**32,
            "samplers": SAMPLERS,
            **cutoffs,
        }

    def completion(self, reply: Any) -> Completion:
        """With the id that ended the response, which the server returns as its last one."""
        if not isinstance(reply, dict) or not isinstance(ids := reply.get("tokens"), list):
            raise ServerUnavailable("a response that is not of the form of llama.cpp's /completion")
        kind, text = reply.get("stop_type"), reply.get("content")
        return Completion(
            ids,
            text if isinstance(text, str) else None,
            finish_reason=REASONS.get(str(kind), kind),
            stop=ids[-1] if ids and kind == "eos" else None,
        )

    def longest_text(self, model: Mapping[str, Any]) -> int | None:
        described = model.get("meta")
        room = described.get("n_ctx") if isinstance(described, dict) else None
        return room if isinstance(room, int) else None

    def title_at(self, server: Server) -> str:
        """With the build. The wheel's server does not know its build; scripts/llama_server.py gives
        it the wheel's version as a tag."""
        version = version_at(server, "/props", "build_info")
        if version == UNKNOWN_BUILD:
            version = _first_tag(server)
        return f"{f'llama.cpp {version}' if version else 'llama.cpp'} at {server.url}"

    # What a server makes of words

    def tokens_of_text(self, server: Server, model: str, words: str) -> list[int] | None:
        return _tokens(server, {"content": words, "add_special": False, "parse_special": False})

    def tokens_of_chat(self, server: Server, model: str, words: str) -> list[int] | None:
        """Rendered by /apply-template, which adds the generation prompt. It removes a leading BOS
        that the server adds again where it tokenises (`add_special`)."""
        chat = {"messages": [{"role": "user", "content": words}]}
        reply = server.ask("POST", f"{server.root}/apply-template", chat)
        text = reply.get("prompt") if isinstance(reply, dict) else None
        if not isinstance(text, str):
            return None
        return _tokens(server, {"content": text, "add_special": True, "parse_special": True})

    # Figures of speculation

    def require_drafting(self, server: Server) -> None:
        """By /slots, if the server has it, and by its counters."""
        try:
            slots = server.get(f"{server.root}/slots")
        except (RequestRejected, ServerUnavailable):
            slots = []
        told = [slot.get("speculative") for slot in slots if isinstance(slot, dict)]
        require(
            False not in told,
            f"{server.url} serves without a draft: give llama-server --model-draft and "
            "--spec-type, as scripts/serve --engine llama.cpp --draft does",
        )
        require(
            self.speculation_so_far(server) is not None,
            f"{server.url} has no counters of speculation (llamacpp:spec_decode in its /metrics): "
            "start llama-server with --metrics, as scripts/serve does; older builds have none",
        )

    def speculation_counts_of(self, reply: Any, server: Server) -> SpeculationCounts:
        """Exact for the accepted tokens. The steps follow from them: each emits one more token.
        They are too few by what the last step accepted beyond an end token, so the counters are
        read for them, too."""
        timings = reply.get("timings")
        timings = timings if isinstance(timings, dict) else {}
        tokens, accepted = timings.get("predicted_n"), timings.get("draft_n_accepted", 0)
        if type(tokens) is not int or type(accepted) is not int:
            raise UserError(
                f"{server.url} gives no figures with its response (timings.predicted_n): nothing "
                "was measured"
            )
        return SpeculationCounts(max(0, tokens - 1 - accepted), accepted)

    def decoding_seconds_of(self, reply: Any) -> float | None:
        """`predicted_ms` begins when the first token has been drawn."""
        timings = reply.get("timings")
        timed = timings.get("predicted_ms") if isinstance(timings, dict) else None
        return timed / 1000 if isinstance(timed, int | float) else None

    def speculation_so_far(self, server: Server) -> SpeculationCounts | None:
        """Read the counters in /metrics whose names begin with llamacpp:spec_decode. Raises
        UserError once they are rounded."""
        try:
            page = server.get(f"{server.root}/metrics")
        except (RequestRejected, ServerUnavailable):  # it was started without --metrics
            return None
        counts = speculation_counters(str(page), "llamacpp")
        require(
            counts is None or max(counts.steps, counts.accepted) < ROUNDED,
            f"{server.url} has counted a million tokens or more, and prints such counts rounded: "
            "start it again to measure",
        )
        return counts


def _tokens(server: Server, body: dict[str, Any]) -> list[int] | None:
    return ids_of_reply(server.ask("POST", f"{server.root}/tokenize", body))


def _first_tag(server: Server) -> str | None:
    """The first tag of a server's model; None if it has none."""
    try:
        return str(server.get("/models")["data"][0]["tags"][0])
    except (RequestRejected, ServerUnavailable, TypeError, KeyError, IndexError):
        return None


def _options(values: Mapping[str, Any]) -> list[str]:
    """Options of a command line from their names and values."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]

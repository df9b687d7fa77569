"""vLLM: starting it, requests to it, its counters, and its files of hidden states.

This file is for vLLM 0.32. It runs in its own environment (scripts/serving-env), with our connector
for hidden states (scripts/hidden_states.py).

A file of hidden states holds `hidden_states` [T, layers, D], in the order in which the response
lists the layers, and `token_ids` [T]. A lock on FILE.lock is held until the file is complete. The
reader of the file deletes both, but only files of our connector: an engine may name any path. Its
folder holds a file `FOLDER_MARK`, and the header of each of its files holds `MARK`.
"""

import fcntl
import json
import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from specdec.engines.client import Server, ServerUnavailable
from specdec.engines.engine_interface import (
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
from specdec.errors import UserError, first_line, require, unreadable

METHODS = {  # the method in the speculative config, by drafter
    "eagle": "eagle",
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "medusa": "medusa",
    "mtp": "mtp",
    "dflash": "dflash",
    "jetspec": "dflash",
    "lm": "draft_model",
}
PARALLEL = {"peagle"}  # drafters with the option `parallel_drafting`

RESPONSE_STATES = {"include_output_tokens": True}  # `kv_transfer_params`: of the response, too
FOLDER_MARK = ".draftsmith-states"  # in a folder for hidden states; see scripts/hidden_states.py
MARK = {"written_by": "draftsmith"}  # in the header of each of its files
LONGEST_HEADER = 2**20  # bytes
REMEDY = "start the engine with scripts/serve (docs/engines.md)"


class Vllm(Engine):
    """vLLM, and any server that supports or ignores its fields."""

    name, title, owners = "vllm", "vLLM", ("vllm",)
    layouts = dict.fromkeys(METHODS, "hf")
    install = "run scripts/serving-env"
    template_options = "--default-chat-template-kwargs", "--chat-template"

    # Serving

    def python(self, repository: Path) -> Path:
        venv = os.environ.get("DRAFTSMITH_SERVING_VENV", repository / ".venv-serving")
        return Path(venv) / "bin" / "python"

    def environment(self, scripts: Path) -> Mapping[str, str]:
        """vLLM finds the connector for hidden states in the scripts' folder."""
        space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
        return {"PYTHONPATH": python_path_with(scripts), "VLLM_CPU_KVCACHE_SPACE": space}

    def serve_command(
        self, python: Path, target: TargetToServe, host: str, port: int, options: Sequence[str]
    ) -> list[str]:
        """The command, without vLLM's prefix cache: hidden states would be missing for cached
        tokens."""
        line = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        line += ["--model", target.model, "--dtype", target.dtype, "--no-enable-prefix-caching"]
        line += ["--served-model-name", target.name]
        if target.revision:
            line += ["--revision", target.revision]
        if target.trust_remote_code:
            line.append("--trust-remote-code")
        if not target.has_cuda:
            line.append("--enforce-eager")
        line += self.chat_options(target.template_args, target.chat_template)
        return [*line, "--host", host, "--port", str(port), *options]

    def speculative_config(self, drafter: str, draft: str, gamma: int) -> dict[str, Any]:
        if drafter not in METHODS:
            raise UserError(f"{draft}: vLLM has no method for a draft of {drafter}")
        how = {"method": METHODS[drafter], "model": draft, "num_speculative_tokens": gamma}
        return how | ({"parallel_drafting": True} if drafter in PARALLEL else {})

    def draft_options(self, draft: DraftToServe) -> list[str]:
        how = self.speculative_config(draft.drafter, str(draft.folder), draft.gamma)
        options = ["--speculative-config", json.dumps(how)]
        options += ["--per-request-spec-decode-metrics", "summary"]  # see `speculation_counts_of`
        return options + (["--hf-overrides", draft.overrides] if draft.overrides else [])

    def states_options(self, layers: Sequence[int], folder: Path) -> list[str]:
        hidden = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
        method = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
        connector = {
            "kv_connector": "HiddenStates",
            "kv_connector_module_path": "hidden_states",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
        return [
            "--speculative-config",
            json.dumps(method | {"draft_model_config": hidden}),
            "--kv-transfer-config",
            json.dumps(connector),
        ]

    def remove_unread_states(self, folder: Path) -> None:
        remove_states(folder)

    def shown_commands(
        self,
        drafter: str,
        draft: str,
        target: str,
        gamma: int,
        overrides: str | None,
        options: Sequence[str] = (),
    ) -> tuple[str, ...]:
        more = f' --hf-overrides "$(cat {overrides})"' if overrides else ""
        more += f" {shlex.join(options)}" if options else ""
        how = json.dumps(self.speculative_config(drafter, draft, gamma))
        return (f"vllm serve {target}{more} --speculative-config \\", f"  '{how}'")

    # Requests

    def completion_body(self, request: CompletionRequest) -> dict[str, Any]:
        """A request with ids that asks for ids. A response that may have to be read as text keeps
        its special tokens."""
        body: dict[str, Any] = {"prompt": list(request.prompt), "max_tokens": request.limit}
        if request.eos is not None:
            body["stop_token_ids"] = list(request.eos)
        body["return_token_ids"] = True
        if request.text_needed:
            body["skip_special_tokens"] = False
        body |= self.sampling(request.sampler, request.seed)
        if request.fresh:
            body["cache_salt"] = uuid4().hex  # prefixes are shared under the same salt alone
        if request.states is not None:
            body["kv_transfer_params"] = RESPONSE_STATES if request.states == "response" else {}
        return body

    def title_at(self, server: Server) -> str:
        version = version_at(server, "/version", "version")
        return f"{f'vLLM {version}' if version else 'the engine'} at {server.url}"

    # What a server makes of words

    def tokens_of_text(self, server: Server, model: str, words: str) -> list[int] | None:
        body = {"model": model, "prompt": words, "add_special_tokens": False}
        return ids_of_reply(server.ask("POST", f"{server.root}/tokenize", body))

    def tokens_of_chat(self, server: Server, model: str, words: str) -> list[int] | None:
        messages = [{"role": "user", "content": words}]
        body = {"model": model, "messages": messages, "add_generation_prompt": True}
        return ids_of_reply(server.ask("POST", f"{server.root}/tokenize", body))

    # Hidden states

    def hidden_states(
        self, reply: Any, text: Sequence[int], layers: Sequence[int], width: int
    ) -> list[Tensor]:
        return states_in_reply(reply, text, layers, width)

    # Figures of speculation

    def require_drafting(self, server: Server) -> None:
        require(
            self.speculation_so_far(server) is not None,
            f"{server.url} has no counters of speculation (vllm:spec_decode in its /metrics): "
            "serve the target with the draft, as scripts/serve --draft does",
        )

    def speculation_counts_of(self, reply: Any, server: Server) -> SpeculationCounts | None:
        """Read `metrics.speculative_decoding`, which vLLM returns with
        --per-request-spec-decode-metrics."""
        metrics = reply.get("metrics")
        figures = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if figures is None:
            return None
        try:
            by_accepted = [int(count) for count in figures["acceptance_histogram"]]
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(
                f"{server.url} gives figures of speculation without an acceptance_histogram: "
                "serve without --per-request-spec-decode-metrics, so that its counters are read"
            ) from error
        by_position = tuple(sum(by_accepted[k:]) for k in range(1, len(by_accepted)))
        return SpeculationCounts(sum(by_accepted), sum(by_position), by_position)

    def speculation_so_far(self, server: Server) -> SpeculationCounts | None:
        """Read the counters in /metrics whose names begin with vllm:spec_decode."""
        return speculation_counters(str(server.get(f"{server.root}/metrics")), "vllm")


def states_in_reply(
    reply: Any, text: Sequence[int], layers: Sequence[int], width: int
) -> list[Tensor]:
    """The states [T, D] in a reply's file after each of these layers, for the tokens of `text` or
    all but the last. Raises UserError if they cannot be a target's of this width; ServerUnavailable
    for a file that an engine has not finished."""
    params = reply.get("kv_transfer_params")
    params = params if isinstance(params, dict) else {}
    path, kept = params.get("hidden_states_path"), params.get("layers")
    if not isinstance(path, str) or not isinstance(kept, list):
        raise UserError(
            "hidden_states.from: the engine does not write hidden states, or not by our connector: "
            f"{REMEDY}"
        )
    lacking = [k for k in layers if k not in kept]
    require(
        not lacking,
        f"hidden_states.from: the engine writes the states of the layers {kept}, and this draft "
        f"reads {list(layers)}: {REMEDY} for this draft",
    )
    tensors = _read(Path(path), len(text) * (len(kept) * width + 1) * 8)
    ids, states = tensors.get("token_ids"), tensors.get("hidden_states")
    if ids is None or states is None:
        raise ServerUnavailable(f"{path} holds no hidden states")
    read = ids.tolist()
    require(
        read in (list(text), list(text[:-1])),
        f"hidden_states.from: the engine wrote the states of {len(read)} other tokens than the "
        f"{len(text)} that were sent and answered: {REMEDY}, which turns its prefix cache off",
    )
    require(
        list(states.shape) == [len(read), len(kept), width],
        f"hidden_states.from: the engine wrote states of the shape {list(states.shape)}, not "
        f"{[len(read), len(kept), width]}: it serves another model: serve the checkpoint of "
        "target.path",
    )
    wanted = [states[:, kept.index(k)] for k in layers]
    require(
        all(bool(x.isfinite().all()) for x in wanted),
        "hidden_states.from: the engine wrote states that are not finite numbers: serve the target "
        "in a dtype that it was trained in, such as bfloat16",
    )
    return wanted


def is_ours(path: Path) -> bool:
    """Whether our connector wrote this file, by its name and the mark in its header; a link is not
    ours. Raises OSError for a file that cannot be read."""
    if path.suffix != ".safetensors" or not stat.S_ISREG(path.lstat().st_mode):
        return False
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, LONGEST_HEADER)))
            kept = header["__metadata__"]
            return all(kept.get(key) == value for key, value in MARK.items())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False


def remove_states(folder: Path) -> None:
    """Remove the hidden states in a folder that our connector wrote and nobody has read. Other
    files are kept."""
    if not (folder / FOLDER_MARK).is_file():
        return
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):
            if is_ours(path):
                path.unlink()
    for lock in folder.glob("*.safetensors.lock"):
        if not lock.with_suffix("").exists() and not lock.lstat().st_size:
            lock.unlink(missing_ok=True)


def _read(path: Path, most: int) -> dict[str, Tensor]:
    """The tensors of a file of at most `most` bytes, once it is complete; the file is deleted.
    Raises UserError for a file that our connector did not write, which is kept."""
    lock = path.with_name(f"{path.name}.lock")
    if not path.parent.is_dir():
        raise UserError(
            f"hidden_states.from: the engine wrote the states to {path.parent}, which does not "
            "exist here: both must share that folder"
        )
    foreign = (
        f"hidden_states.from: the engine names {path}, which our connector did not write: {REMEDY}"
    )
    require(path.suffix == ".safetensors", foreign)
    try:
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)  # an engine that dies releases it
        finally:
            os.close(file)
        # only now: the connector marks its folder when it writes the first file
        require((path.parent / FOLDER_MARK).is_file() and is_ours(path), foreign)
        size = path.stat().st_size
        require(
            size <= most + LONGEST_HEADER,
            f"hidden_states.from: the engine wrote {size:,} bytes of states where at most {most:,} "
            f"fit the tokens: it serves another model: serve the checkpoint of target.path",
        )
        written = path.read_bytes()
    except FileNotFoundError as error:
        raise ServerUnavailable(f"{path} was not written") from error
    except OSError as error:
        raise unreadable(path, error) or error from error
    try:
        return load(written)
    except (SafetensorError, ValueError) as error:
        raise ServerUnavailable(f"{path} cannot be read ({first_line(error)})") from error
    finally:
        for each in (path, lock):
            with suppress(OSError):
                each.unlink()

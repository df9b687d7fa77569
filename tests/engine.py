"""A small server in the test's own process that behaves like vLLM's.

It serves a target by our decoder. `faults` spoil its responses: each is called with the number of
the request, from 0, and the reply, and returns the reply to send, an HTTP status instead of a
reply, or None to break the connection off.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file

from specdec.context import HiddenStateSpec
from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.engines.vllm import FOLDER_MARK, MARK
from specdec.sampling.sampler import Sampler
from specdec.targets.target import Target

OF_ENGINE = '{engine="0",model_name="tiny"'  # labels of vLLM's counters
Fault = Callable[[int, dict[str, Any]], dict[str, Any] | int | None]


class FakeEngine:
    """The server; `asked` are the bodies of the completions that it was asked for."""

    def __init__(
        self,
        target: Target,
        fault: Fault | None = None,
        room: int = 512,
        states: Path | None = None,
        layers: Sequence[int] = (),
        port: int = 0,
        drafts: Way | None = None,
        per_request: bool = False,
        toy: bool = False,
    ) -> None:
        """With a folder for `states`, it writes the hidden states after these layers there; with
        `drafts`, it decodes with the draft of that way and counts as vLLM does, and with
        `per_request` also as with its --per-request-spec-decode-metrics=summary. With `toy`, it
        speaks as the engine of tests/toy_engine.py does."""
        self.drafts, self.counts, self.per_request = drafts, Counter[str](), per_request
        for name in ("drafts", "accepted_tokens"):  # vLLM's counters are there from the start
            self.counts[f"{name}_total{OF_ENGINE}}}"] = 0
        self.target, self.fault, self.states, self.layers = target, fault, states, list(layers)
        self.models = [{"id": "tiny", "root": target.name, "max_model_len": room}]
        if toy:
            self.models = [{"id": "tiny", "owned_by": "toy", "meta": {"room": room}}]
        self.toy = toy
        self.asked: list[dict[str, Any]] = []
        # what /tokenize makes ids with
        self.tokenizer, self.template_args = target.tokenizer, dict[str, Any]()
        self._one, self.seen = threading.Lock(), 0
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def asked(self) -> None:
                if self.command == "GET":
                    self.send(engine.get(self.path))
                    return
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send(engine.post(self.path, body))

            def send(self, reply: Any) -> None:
                if reply is None:
                    self.close_connection = True
                    return
                status = reply if isinstance(reply, int) else 200
                if isinstance(reply, int):
                    reply = {"error": {"message": f"made up\nfor a test ({reply})"}}
                content = reply if isinstance(reply, str) else json.dumps(reply)
                kind = "text/plain" if isinstance(reply, str) else "application/json"
                with suppress(BrokenPipeError, ConnectionResetError):  # the client has gone away
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.end_headers()
                    self.wfile.write(content.encode())

            def log_message(self, *_: Any) -> None:
                pass

        for method in ("GET", "POST"):  # names that the base class asks for
            setattr(Handler, f"do_{method}", Handler.asked)
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [tuple(body["prompt"]) for body in self.asked]

    def get(self, path: str) -> Any:
        responses = {"/v1/models": {"data": self.models}, "/version": {"version": "0.0"}}
        if path == "/metrics" and self.drafts is not None:
            return "".join(
                f"# TYPE {name} counter\nvllm:spec_decode_num_{name} {float(count)}\n"
                for name, count in self.counts.items()
            )
        return responses.get(path, 404)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/tokenize":
            return self.tokenized(body)
        if path != ("/completion" if self.toy else "/v1/completions"):
            return 404
        with self._one:  # the decoder takes one batch at a time
            number = len(self.asked)
            self.asked.append(body)
            reply = self.toy_completion(body) if self.toy else self.completion(body)
        return reply if self.fault is None else self.fault(number, reply)

    def tokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        words = body.get("prompt")
        if words is None:
            how = {"tokenize": False, "add_generation_prompt": body["add_generation_prompt"]}
            words = self.tokenizer.apply_chat_template(
                body["messages"], **how, **self.template_args
            )
        return {"tokens": self.tokenizer(words, add_special_tokens=False)["input_ids"]}

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, limit = body["prompt"], body["max_tokens"]
        sampler = Sampler(body["temperature"], max(0, body["top_k"]), body["top_p"])
        eos = tuple(body.get("stop_token_ids", ()))
        (response,) = decode(
            self.target,
            [prompt],
            replace(self.drafts or Way(), sampler=sampler),
            max_new_tokens=limit,
            eos=eos,
            seeds=[body["seed"]],
        )
        for drafted in response.steps if self.drafts else ():
            self.counts[f"drafts_total{OF_ENGINE}}}"] += 1
            self.counts[f"accepted_tokens_total{OF_ENGINE}}}"] += drafted.accepted
            for k in range(drafted.drafted):
                at = f'accepted_tokens_per_pos_total{OF_ENGINE},position="{k}"}}'
                self.counts[at] += drafted.accepted > k
        ended = response.ids[-1] in eos
        choice = {
            "index": 0,
            "text": self.target.tokenizer.decode(response.ids[:-1] if ended else response.ids),
            "finish_reason": "stop" if ended else "length",
        }
        if body.get("return_token_ids"):
            choice |= {"token_ids": response.ids, "prompt_token_ids": prompt}
        reply = {"object": "text_completion", "model": "tiny", "choices": [choice]}
        if self.drafts is not None and self.per_request:
            assert self.drafts.shape is not None
            steps, gamma = response.steps, self.drafts.shape.depth
            accepted, drafted = (sum(getattr(r, x) for r in steps) for x in ("accepted", "drafted"))
            reply["metrics"] = {
                "time_to_first_token_ms": None,
                "speculative_decoding": {
                    "mean_acceptance_length": 1 + accepted / max(1, len(steps)),
                    "draft_acceptance_rate": accepted / max(1, drafted),
                    "acceptance_histogram": [
                        sum(r.accepted == n for r in steps) for n in range(gamma + 1)
                    ],
                    "num_spec_steps": len(steps),
                    "num_accepted_draft_tokens": accepted,
                    "num_draft_tokens": drafted,
                    "num_spec_tokens": gamma,
                },
            }
        asked = body.get("kv_transfer_params")
        if self.states is not None and asked is not None:
            text = [*prompt, *response.ids][:-1] if asked.get("include_output_tokens") else prompt
            reply["kv_transfer_params"] = self.written(text)
        return reply

    def toy_completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same response in the words of tests/toy_engine.py."""
        names = {"limit": "max_tokens", "ends": "stop_token_ids"}
        more = {"top_k": 0, "top_p": 1.0, "return_token_ids": True}
        reply = self.completion({names.get(name, name): x for name, x in body.items()} | more)
        (choice,) = reply["choices"]
        accepted = self.counts[f"accepted_tokens_total{OF_ENGINE}}}"] - self.seen
        self.seen += accepted
        return {"tokens": choice["token_ids"], "why": choice["finish_reason"], "kept": accepted}

    @torch.no_grad()
    def written(self, ids: Sequence[int]) -> dict[str, Any]:
        """What scripts/hidden_states.py responses, once it has written the states of a text."""
        assert self.states is not None
        needs = HiddenStateSpec(tuple(self.layers))
        ctx, _ = self.target.hidden_states(
            torch.tensor([list(ids)], device=self.target.device), needs
        )
        assert ctx.layers_BTF is not None
        states = ctx.layers_BTF[0].unflatten(-1, (len(self.layers), -1)).cpu().contiguous()
        (self.states / FOLDER_MARK).touch()
        path = self.states / f"{uuid4().hex}.safetensors"
        tensors = {"hidden_states": states, "token_ids": torch.tensor(ids)}
        save_file(tensors, path, metadata=MARK)
        path.with_name(f"{path.name}.lock").touch()
        return {"hidden_states_path": str(path), "layers": self.layers}

    @contextmanager
    def serving(self) -> Iterator["FakeEngine"]:
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

"""SGLang: how its server is asked and measured. Not tested with SGLang itself.

Everything here is as SGLang documents its native interface: /generate takes `input_ids` and
`sampling_params` and returns `output_ids` and `meta_info`. There, `spec_verify_ct` is the number of
speculation steps of a response, and `spec_accept_histogram` (older versions lack it) says how many
of them accepted 0, 1, 2, … drafted tokens.
"""

from typing import Any

from specdec.engines.client import Server, ServerUnavailable
from specdec.engines.engine_interface import (
    Completion,
    CompletionRequest,
    Engine,
    SpeculationCounts,
    ids_of_reply,
    version_at,
)
from specdec.errors import require
from specdec.sampling.sampler import Sampler


class SGLang(Engine):
    """SGLang's server."""

    name, title, owners = "sglang", "SGLang", ("sglang",)

    def completion_url(self, server: Server) -> str:
        """Not OpenAI's: only this one takes ids and returns ids."""
        return f"{server.root}/generate"

    def completion_body(self, request: CompletionRequest) -> dict[str, Any]:
        """A `fresh` request is no different: start SGLang with --disable-radix-cache."""
        if request.states is not None:
            raise self.no_states()
        sampling = {"max_new_tokens": request.limit, **self.sampling(request.sampler, request.seed)}
        if request.eos is not None:
            sampling["stop_token_ids"] = list(request.eos)
        return {"input_ids": list(request.prompt), "sampling_params": sampling}

    def sampling(self, sampler: Sampler, seed: int) -> dict[str, Any]:
        settings = super().sampling(sampler, seed)
        return {"sampling_seed": settings.pop("seed"), **settings}

    def completion(self, reply: Any) -> Completion:
        ids, meta = ids_of_reply(reply, "output_ids"), self._meta(reply)
        if ids is None:
            raise ServerUnavailable("a response that is not of the form of SGLang's /generate")
        finish = meta.get("finish_reason")
        finish = finish if isinstance(finish, dict) else {}
        return Completion(ids, reply.get("text"), None, finish.get("type"), finish.get("matched"))

    def title_at(self, server: Server) -> str:
        version = version_at(server, "/server_info", "version")
        return f"{f'SGLang {version}' if version else 'SGLang'} at {server.url}"

    def tokens_of_text(self, server: Server, model: str, words: str) -> list[int] | None:
        body = {"model": model, "prompt": words, "add_special_tokens": False}
        return ids_of_reply(server.ask("POST", f"{server.root}/tokenize", body))

    def speculation_counts_of(self, reply: Any, server: Server) -> SpeculationCounts:
        meta, ids = self._meta(reply), ids_of_reply(reply, "output_ids") or []
        steps, by_accepted = meta.get("spec_verify_ct"), meta.get("spec_accept_histogram")
        require(
            type(steps) is int,
            f"{server.url} gives no meta_info.spec_verify_ct with its response: serve the target "
            "with a draft (--speculative-algorithm)",
        )
        assert isinstance(steps, int)
        if not isinstance(by_accepted, list) or not all(type(n) is int for n in by_accepted):
            # every token but the first, and those of the steps themselves, was accepted
            return SpeculationCounts(steps, max(0, len(ids) - 1 - steps))
        by_position = tuple(sum(by_accepted[k:]) for k in range(1, len(by_accepted)))
        return SpeculationCounts(steps, sum(by_position), by_position)

    @staticmethod
    def _meta(reply: Any) -> dict[str, Any]:
        meta = reply.get("meta_info") if isinstance(reply, dict) else None
        return meta if isinstance(meta, dict) else {}

"""SGLang's fields, by its documentation.

Run alone: python -m pytest tests/engines/test_sglang.py (under 5 s)
"""

from typing import Any

import pytest

from specdec.engines.engine_interface import Completion, CompletionRequest
from specdec.engines.known_engines import engine_of
from specdec.engines.sglang import SGLang
from specdec.errors import UserError
from specdec.sampling.sampler import Sampler

# by srt/sampling/sampling_params.py, which rejects any other field
FIELDS = {
    *("max_new_tokens", "stop_token_ids", "temperature", "top_p", "top_k", "sampling_seed"),
    *("min_p", "ignore_eos", "n", "stop", "skip_special_tokens"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_fields_of_requests(temperature: float) -> None:
    engine = engine_of("sglang")
    assert isinstance(engine, SGLang)
    asked = CompletionRequest([1, 2], 9, Sampler(temperature, 3, 0.5), 17, eos=(2,))
    body = engine.completion_body(asked)
    sampling: dict[str, Any] = body.pop("sampling_params")
    assert body == {"input_ids": [1, 2]} and {*sampling} <= FIELDS
    wanted = {"max_new_tokens": 9, "stop_token_ids": [2], "temperature": temperature}
    assert wanted.items() <= sampling.items()
    assert sampling.get("sampling_seed", 17) == 17
    with pytest.raises(UserError, match="SGLang gives no hidden states"):
        engine.completion_body(CompletionRequest([1], 1, Sampler(0.0), 0, states="prompt"))


def test_replies_are_read() -> None:
    finish = {"type": "stop", "matched": 2}
    reply = {"output_ids": [5, 2], "text": "a", "meta_info": {"finish_reason": finish}}
    assert SGLang().completion(reply) == Completion([5, 2], "a", None, "stop", 2)

"""llama.cpp's fields, figures and command line; llama.cpp itself runs in tests/test_end_to_end.py.

Run alone: python -m pytest tests/engines/test_llama_cpp.py (under 30 s)
"""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from rich.progress import Progress

from specdec.decoding.decode import generate
from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.engines.client import Server, ServerUnavailable
from specdec.engines.engine_interface import Completion, CompletionRequest, SpeculationCounts
from specdec.engines.llama_cpp import LlamaCpp
from specdec.errors import UserError
from specdec.formats.gguf_file import (
    ARCHITECTURE,
    FILE_TYPE,
    MARK_KEY,
    WEIGHT_TYPES,
    read_tensors,
    typed_keys,
    write_gguf,
)
from specdec.formats.gguf_target import float32_gguf
from specdec.measure.served import MeasuredServer, measure_served
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.engine import FakeEngine
from tests.processes import process
from tests.tiny import Tiny, lm
from tests.told import require_one_line
from train.data.engine_responses import (
    EngineResponse,
    ids_of,
    require_room_in,
    responses_of,
    servers_of,
)

PROMPTS = [[5, 6, 7], [8, 9, 20, 30], [40, 41]]
NEW = 12
TEMPLATE = "{{ messages }}, and 'more'\n"
Serve = Callable[..., "FakeLlamaCpp"]


class FakeLlamaCpp(FakeEngine):
    """A server with the paths, fields and counters of llama.cpp's."""

    def __init__(self, target: Target, room: int = 512, **options: Any) -> None:
        super().__init__(target, **options)
        self.models = [{"id": "tiny", "owned_by": "llamacpp", "meta": {"n_ctx": room}}]

    def get(self, path: str) -> Any:
        own = {"/slots": [{"id": 0, "speculative": self.drafts is not None}]}
        own["/props"] = {"build_info": "b1-test"}  # type: ignore[assignment]
        page = own.get(path) or super().get(path)
        return page.replace("vllm:", "llamacpp:") if isinstance(page, str) else page

    def accepted(self) -> int:
        named = (n for name, n in self.counts.items() if name.startswith("accepted_tokens_total"))
        return sum(named)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path != "/completion":
            return 404
        self.asked.append(body)
        before = self.accepted()
        asked = body | {"max_tokens": body["n_predict"], "return_token_ids": True}
        ends = [] if body.get("ignore_eos") else self.target.eos
        (choice,) = self.completion(asked | {"stop_token_ids": ends})["choices"]
        ids = choice["token_ids"]
        timings = {"predicted_n": len(ids)}
        if self.drafts is not None:
            timings["draft_n_accepted"] = self.accepted() - before
        stop = "eos" if choice["finish_reason"] == "stop" else "limit"
        reply = {"tokens": ids, "content": "", "stop_type": stop, "timings": timings}
        return reply if self.fault is None else self.fault(len(self.asked) - 1, reply)


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Target:
    return load_target(TargetConfig(str(tiny.target), "float32", "cpu"))


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return lm(target, 0.02)


@pytest.fixture
def serve(target: Target) -> Iterator[Serve]:
    with ExitStack() as servers:

        def start(**options: Any) -> FakeLlamaCpp:
            one = FakeLlamaCpp(target, **options)
            servers.enter_context(one.serving())
            return one

        yield start


def server_of(target: Target, one: FakeEngine) -> MeasuredServer:
    return MeasuredServer(Server.at_address("--engine", one.url), target, speculates=True)


def test_the_fields_of_requests() -> None:
    """Cutoffs after the temperature, as ours, and none of the server's own samplers."""
    llama, drawn = LlamaCpp(), Sampler(0.7, 20, 0.9)
    asked = CompletionRequest([1, 2], 9, drawn, 2**32 + 3, eos=(2,), text_needed=True)
    assert llama.completion_body(asked) == {
        "prompt": [1, 2],
        "n_predict": 9,
        "return_tokens": True,
        "cache_prompt": False,
        "temperature": 0.7,
        "seed": 3,
        "samplers": ["temperature", "top_k", "top_p"],
        "top_k": 20,
        "top_p": 0.9,
    }
    assert llama.completion_url(Server("http://x/v1")) == "http://x/completion"
    states = CompletionRequest([1], 1, Sampler(0.0), 0, states="prompt")
    with pytest.raises(UserError, match=r"hidden_states\.from: llama\.cpp gives no hidden states"):
        llama.completion_body(states)


def test_a_chat_is_tokenised_with_the_bos_that_its_rendering_lacks() -> None:
    """/apply-template removes a leading BOS where the vocabulary adds one; words have none."""
    asked: list[dict[str, Any]] = []

    class Answers:
        root = "http://here"

        def ask(self, method: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
            asked.append(body)
            return {"prompt": "<user>a"} if url.endswith("/apply-template") else {"tokens": [1, 2]}

    llama, server = LlamaCpp(), cast(Server, Answers())
    assert llama.tokens_of_chat(server, "m", "a") == [1, 2]
    assert llama.tokens_of_text(server, "m", "a") == [1, 2]
    assert asked[0] == {"messages": [{"role": "user", "content": "a"}]}
    wanted = {"content": "<user>a", "add_special": True, "parse_special": True}
    assert asked[1:] == [wanted, {"content": "a", "add_special": False, "parse_special": False}]


def test_replies_are_read() -> None:
    llama = LlamaCpp()
    ended = llama.completion({"tokens": [5, 2], "content": "a", "stop_type": "eos"})
    assert ended == Completion([5, 2], "a", finish_reason="stop", stop=2)
    assert llama.completion({"tokens": [5], "stop_type": "limit"}).finish_reason == "length"
    assert llama.completion({"tokens": [5], "stop_type": "none"}).finish_reason == "none"
    for reply in ({"choices": []}, [], {"tokens": "5"}):
        with pytest.raises(ServerUnavailable, match="not of the form of llama"):
            llama.completion(reply)
    timings = {"timings": {"predicted_n": 9, "draft_n": 6, "draft_n_accepted": 3}}
    server = Server("http://x/v1")
    assert llama.speculation_counts_of(timings, server) == SpeculationCounts(5, 3)
    undrafted = {"timings": {"predicted_n": 1}}
    assert llama.speculation_counts_of(undrafted, server) == SpeculationCounts(0, 0)
    with pytest.raises(UserError, match="no figures with its response"):
        llama.speculation_counts_of({"timings": None}, server)
    assert llama.longest_text({"meta": {"n_ctx": 77}}) == 77
    assert llama.longest_text({"meta": None}) is None


def test_the_figures_are_what_our_decoder_counts(
    target: Target, drafter: Drafter, serve: Serve
) -> None:
    way = Way(drafter, Chain(2))
    engine = server_of(target, serve(drafts=way))
    assert engine.title == f"llama.cpp b1-test at {engine.server.url}"
    with Progress(disable=True) as bar:
        (greedy,) = measure_served(engine, None, PROMPTS, [Sampler(0.0)], NEW, 3, bar)
    made = [generate(target, prompt, way, max_new_tokens=NEW) for prompt in PROMPTS]
    steps = [r for g in made for r in g.steps]
    shares = [sum(r.accepted > k for r in steps) / len(steps) for k in range(2)]
    assert greedy.speculation_steps == len(steps)
    assert [share.value for share in greedy.accepted] == pytest.approx(shares) and shares[0] > 0
    assert greedy.tau.value == pytest.approx(sum(len(g.ids) - 1 for g in made) / len(steps))


def test_a_response_that_others_disturb_is_told(
    target: Target, drafter: Drafter, serve: Serve
) -> None:
    """The response says how many accepted tokens are its own."""
    busy = serve(drafts=Way(drafter, Chain(2)))
    busy.fault = lambda _n, reply: busy.counts.update(dict.fromkeys(busy.counts, 50)) or reply
    with pytest.raises(UserError, match=r"accepted tokens for .*: somebody else uses this engine"):
        server_of(target, busy).reply(PROMPTS[0], NEW, Sampler(0.0), 0)


def test_steps_without_a_draft_count() -> None:
    """The server drafts no further than the response may go, so its last step may draft nothing:
    the counters then have a step less than the response has."""
    llama, own = LlamaCpp(), SpeculationCounts(4, 3)
    one = MeasuredServer.__new__(MeasuredServer)
    one.server, one.engine = Server("http://x/v1"), llama
    now = SpeculationCounts(13, 8, (6, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaCpp, "speculation_so_far", lambda *_: now)
        counted = one._with_positions(SpeculationCounts(10, 5, (4, 1)), own)
    assert counted == SpeculationCounts(4, 3, (2, 1))


def test_a_server_that_is_not_measured_says_why(
    target: Target, drafter: Drafter, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="serves without a draft: give llama-server --model-draft"):
        server_of(target, serve())
    one, get = serve(drafts=Way(drafter, Chain(2))), FakeLlamaCpp.get
    monkeypatch.setattr(
        one, "get", lambda path: 501 if path in ("/metrics", "/slots") else get(one, path)
    )
    with pytest.raises(UserError, match="start llama-server with --metrics"):
        server_of(target, one)


@pytest.mark.parametrize(("steps", "exact"), [("13", True), ("1.23457e+06", False)])
def test_counters_are_read_until_they_are_rounded(steps: str, exact: bool) -> None:
    """The page as llama.cpp prints it: no labels but the position, and six digits."""
    name = "llamacpp:spec_decode_num"
    page = (
        f"{name}_drafts_total {steps}\n{name}_accepted_tokens_total 8\n"
        f'{name}_accepted_tokens_per_pos_total{{position="0"}} 6\n'
        f'{name}_accepted_tokens_per_pos_total{{position="1"}} 2\n'
    )
    server = Server("http://x/v1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "get", lambda *_: page)
        if exact:
            assert LlamaCpp().speculation_so_far(server) == SpeculationCounts(13, 8, (6, 2))
            return
        with pytest.raises(UserError, match="prints such counts rounded"):
            LlamaCpp().speculation_so_far(server)


def test_responses_come_with_their_ids(target: Target, serve: Serve) -> None:
    expected = generate(target, PROMPTS[0], Way(), max_new_tokens=NEW).ids
    one = serve(room=40)
    pool = servers_of("responses.from", [one.url], target)
    asked, seeds = {"a": PROMPTS[0]}, {"a": 1}
    ((name, response),) = responses_of(pool, target, asked, seeds, Sampler(0.0), NEW, 2)
    assert isinstance(response, EngineResponse) and (name, response.ids) == ("a", expected)
    with pytest.raises(UserError, match="the engine takes 40: serve with --ctx-size 41"):
        require_room_in(pool, 41)


def test_a_response_that_the_engine_ends_by_another_id_is_not_completed(target: Target) -> None:
    """llama.cpp marks ends by names of tokens, too; the target would have gone on."""
    (end, *_), other = target.eos, 9
    assert other not in target.eos
    for ids, said in (([5, other], [5, other]), ([5, end], [5, end])):
        reply = {"tokens": ids, "stop_type": "eos"}
        assert ids_of(LlamaCpp().completion(reply), [1], target, NEW) == said


# The command line


def gguf(path: Path, **keys: Any) -> Path:
    """A GGUF file with a tensor and these keys."""
    file_type = int(WEIGHT_TYPES["f32"].file_type)
    write_gguf(path, {"x.weight": torch.ones(2, 2)}, {FILE_TYPE: file_type} | keys)
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    mark = {"drafter": "dspark", "layout": "gguf", "template_args": {"enable_thinking": False}}
    mark["chat_template"] = TEMPLATE
    return {
        "target": str(gguf(tmp_path / "target.gguf", **{ARCHITECTURE: "llama"})),
        "foreign": str(gguf(tmp_path / "foreign.gguf", **{ARCHITECTURE: "eagle3"})),
        "ours": str(
            gguf(tmp_path / "ours.gguf", **{ARCHITECTURE: "dflash", MARK_KEY: json.dumps(mark)})
        ),
    }


def command_of(files: dict[str, str], *arguments: str) -> list[str]:
    target = Path(files["target"])
    settings = ["target=model", f"target.path={target}", "data.path=x"]
    settings.append(f"target.cache={target.parent / 'cache'}")
    line = ["scripts/serve", "--print", "--engine", "llama.cpp", *settings, *arguments]
    ended = process(line)
    assert ended.returncode == 0, ended.stderr
    return shlex.split(ended.stdout.splitlines()[-1])


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_a_gguf_file_is_served_as_it_is(files: dict[str, str]) -> None:
    words = command_of(files, "--plain", "--python", "python3", "--port", "9")
    assert words[1:3] == ["-m", "llama_server"]
    assert after(words, "--model") == files["target"] == after(words, "--alias")
    assert {after(words, name) for name in ("--threads", "--threads-batch")} == {"1"}  # OMP's
    assert "--cache-type-k" not in words and "--model-draft" not in words
    words = command_of(files, "--plain", "--python", "my-llama-server", "--", "--ctx-size", "99")
    assert words[:2] == ["my-llama-server", "--model"] and words[-2:] == ["--ctx-size", "99"]


def test_drafts_of_ours_and_of_others(files: dict[str, str]) -> None:
    words = command_of(files, "--draft", files["ours"], "--gamma", "2", "--python", "python3")
    assert after(words, "--model-draft") == files["ours"]
    assert (after(words, "--spec-type"), after(words, "--spec-draft-n-max")) == (
        "draft-dspark",
        "2",
    )
    assert after(words, "--threads-draft") == after(words, "--threads-batch-draft") == "1"
    assert json.loads(after(words, "--chat-template-kwargs")) == {"enable_thinking": False}
    assert Path(after(words, "--chat-template-file")).read_text() == TEMPLATE
    words = command_of(files, "--draft", files["foreign"], "--python", "python3")
    assert after(words, "--spec-type") == "draft-eagle3"
    assert "--chat-template-file" not in words


def test_float32_is_served_from_a_dequantised_file(files: dict[str, str], tmp_path: Path) -> None:
    words = command_of(files, "target.dtype=float32", "--plain", "--python", "python3")
    model = Path(after(words, "--model"))
    assert model.is_relative_to(tmp_path / "cache") and model.name == "target.gguf"
    assert {after(words, name) for name in ("--cache-type-k", "--cache-type-v")} == {"f32"}


def test_what_llama_cpp_does_not_serve_is_told(
    files: dict[str, str], tiny: Tiny, tmp_path: Path
) -> None:
    settings = ["target=model", "data.path=x"]
    own = f"target.path={files['target']}"
    llama = ["scripts/serve", "--print", "--engine", "llama.cpp", *settings]
    for line, said in (
        ([*llama, own], "gives no hidden states: give --draft or --plain"),
        ([*llama, f"target.path={tiny.target}", "--plain"], "llama.cpp reads GGUF files"),
        ([*llama, own, "target.dtype=bfloat16", "--plain"], "or with target.dtype=float32"),
        ([*llama, own, "--draft", files["target"]], "has no method for a draft of llama"),
        (
            ["scripts/serve", "--print", "--draft", files["foreign"]],
            "vLLM does not load the layout",
        ),
        (
            ["scripts/serve", "--engine", "llama.cpp", *settings, own, "--plain", "--python", "no"],
            "run scripts/llama-cpp-env, or give --python",
        ),
    ):
        ended = process(line)
        assert ended.returncode == 2, ended.stdout
        require_one_line(ended.stderr, said)


# The target in float32


def test_the_float32_file_has_the_weights_of_our_float32_target(tmp_path: Path) -> None:
    """Dequantised, and rounded to bfloat16 as the dense copy is; keys keep their types."""
    drawn = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    keys = {ARCHITECTURE: "llama", "a.list": ["x", "y"], "a.float": 0.5, "a.flag": True}
    keys[FILE_TYPE] = int(WEIGHT_TYPES["q8_0"].file_type)
    factors = torch.tensor([1.0, 1.001])
    write_gguf(tmp_path / "t.gguf", {"w.weight": drawn, "rope_freqs.weight": factors}, keys)
    path = float32_gguf(tmp_path / "t.gguf", tmp_path / "cache")
    stored = GGMLQuantizationType.Q8_0
    dequantised = torch.from_numpy(dequantize(quantize(drawn.numpy(), stored), stored))
    tensors = read_tensors(path)
    assert torch.equal(tensors["w.weight"], dequantised.bfloat16().float())
    assert torch.equal(tensors["rope_freqs.weight"], factors)
    before, now = typed_keys(tmp_path / "t.gguf"), typed_keys(path)
    assert now.pop(FILE_TYPE).value == int(WEIGHT_TYPES["f32"].file_type)
    assert before.pop(FILE_TYPE).value == int(WEIGHT_TYPES["q8_0"].file_type)
    assert now == before
    assert float32_gguf(tmp_path / "t.gguf", tmp_path / "cache") == path

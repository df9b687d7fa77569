"""Responses by engines: the same as in this process, asked once each, and garbage told in one line.

Run alone: python -m pytest tests/train/data/test_engines.py (under 20 s)
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from rich.progress import Progress

from specdec.engines import client, server_pool
from specdec.engines.client import Server
from specdec.engines.vllm import Vllm
from specdec.errors import UserError, require
from specdec.targets.loading import TargetLoader
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.engine import FakeEngine, Fault
from tests.tiny import TEMPLATE, Tiny, compose, make_tokenizer, responding, save_target, write_jsonl
from tests.told import require_one_line, told
from train.data import engine_responses
from train.data.conversations import DataConfig
from train.data.engine_responses import CheckedServerResults, ids_of
from train.data.responses import documents_with_responses
from train.data.sequences import Document, Prompt
from train.data.split import split_prompts

PROMPTS = 12
ServedResponse = Callable[..., list[Document]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "WAITS", (0.01, 0.01))


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> TargetLoader:
    cfg = TargetConfig(str(tiny.target), "float32", "cpu", cache=str(tiny.root / "targets"))
    target = TargetLoader(cfg)
    target.whole()
    return target


@pytest.fixture(scope="module")
def prompts(tiny: Tiny, target: TargetLoader) -> list[Prompt]:
    split = split_prompts(tiny.config().data, target.parts.tokenizer)
    return [*split.train, *split.held_out][:PROMPTS]


@pytest.fixture
def answer(target: TargetLoader, prompts: list[Prompt], tmp_path: Path) -> ServedResponse:
    """Responses to the prompts by these engines, or in this process if there are none."""

    def documents(*servers: FakeEngine, count: int = PROMPTS, **settings: Any) -> list[Document]:
        urls = [server.url for server in servers]
        how = {"max_new_tokens": 8, "batch": 4, "root": str(tmp_path)} | settings
        cfg = responding(**how, engines=urls)
        with Progress(disable=True) as bar:
            return documents_with_responses(
                target, prompts[:count], cfg, Accelerator(cpu=True), bar
            )

    return documents


def texts(documents: Sequence[Document]) -> list[tuple[list[int], list[bool]]]:
    return [(d.ids.tolist(), d.mask.tolist()) for d in documents]


@pytest.fixture
def serve(target: TargetLoader) -> Iterator[Callable[..., FakeEngine]]:
    running = []

    def start(fault: Fault | None = None, of: Target | None = None, **more: Any) -> FakeEngine:
        running.append(FakeEngine(of or target.whole(), fault, **more).serving())
        return running[-1].__enter__()

    yield start
    for engine in running:
        engine.__exit__(None, None, None)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engines_write_what_this_process_writes(
    answer: ServedResponse, serve: Callable[..., FakeEngine], temperature: float
) -> None:
    """At T = 0.8 too, since the fake engine draws with our generator from the seeds sent to it."""
    engine = serve()
    documents = answer(engine, temperature=temperature)
    assert texts(documents) == texts(answer(temperature=temperature))
    assert len(documents) == len(engine.asked) == PROMPTS
    body = engine.asked[0]
    assert body["repetition_penalty"] == 1.0 and body["model"] == "tiny"


def test_the_logs_of_agents_are_answered_after_the_last_result(
    target: TargetLoader, serve: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    """In this process and by an engine, which is sent what transformers writes of the log."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}.{% endfor %}<|im_end|>"
    tokenizer = make_tokenizer(TEMPLATE.replace("<|im_end|>", calls))
    call = {"type": "function", "function": {"name": "wind", "arguments": {}}}
    logs = [
        [
            {"role": "user", "content": f"is it {word} by the sea"},
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            {"role": "tool", "content": "cold"},
            {"role": "tool", "content": "wind and rain"},
        ]
        for word in ("hot", "cold", "blue")
    ]
    path = write_jsonl(tmp_path / "logs.jsonl", [{"messages": log} for log in logs])
    asked = split_prompts(DataConfig(str(path), responses="target", held_out=0), tokenizer).train
    engine, documents = serve(), []
    for urls in ([], [engine.url]):
        cfg = responding(max_new_tokens=8, batch=4, root=str(tmp_path / "root"), engines=urls)
        with Progress(disable=True) as bar:
            documents.append(
                documents_with_responses(target, asked, cfg, Accelerator(cpu=True), bar)
            )
    assert texts(documents[0]) == texts(documents[1])
    written = [tokenizer.apply_chat_template(log, add_generation_prompt=True) for log in logs]
    prompts = {tuple(ids["input_ids"]) for ids in written}
    assert {tuple(body["prompt"]) for body in engine.asked} == prompts
    for document in documents[0]:
        assert tuple(document.ids[~document.mask].tolist()) in prompts and document.mask.any()


def test_nothing_is_asked_twice(
    answer: ServedResponse, serve: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine breaks down after 5 responses: these are kept, and the rest is asked of another."""
    monkeypatch.setattr(server_pool, "IN_A_ROW", 4)
    broken = serve(lambda number, reply: reply if number < 5 else None)
    with pytest.raises(UserError, match=r"4 requests in a row failed.*received before is kept"):
        answer(broken, batch=1)
    sound = serve()
    documents = answer(sound)
    assert texts(documents) == texts(answer())
    assert sorted([*broken.prompts[:5], *sound.prompts]) == sorted(asked_of(documents))
    answer(sound)
    assert len(sound.asked) == PROMPTS - 5


def asked_of(documents: Sequence[Document]) -> list[tuple[int, ...]]:
    return [tuple(d.ids[~d.mask].tolist()) for d in documents]


def test_a_server_that_fails_for_a_moment_is_asked_again(
    answer: ServedResponse, serve: Callable[..., FakeEngine]
) -> None:
    """Every third prompt fails the first time that it is asked, and only then: a request that
    fails three times has used up its tries."""

    def fault(number: int, reply: dict[str, Any]) -> dict[str, Any] | int:
        prompt, before = engine.prompts[number], {*engine.prompts[:number]}
        return 503 if prompt not in before and len(before) % 3 == 0 else reply

    engine = serve(fault)
    assert texts(answer(engine)) == texts(answer())
    assert len(engine.asked) == PROMPTS + PROMPTS // 3


def test_several_servers_share_the_prompts_and_one_may_end(
    answer: ServedResponse, serve: Callable[..., FakeEngine]
) -> None:
    first, second = serve(), serve(lambda number, reply: reply if number < 2 else None)
    assert texts(answer(first, second)) == texts(answer())
    assert len(second.asked) >= 2 and len(first.asked) >= 4


def test_refused_prompts_are_counted_and_left_out(
    answer: ServedResponse,
    serve: Callable[..., FakeEngine],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """They are not asked again until their note is deleted."""
    refusing = serve(lambda number, reply: 400 if number in (3, 7) else reply)
    documents = answer(refusing, batch=1)
    whole = texts(answer())
    assert texts(documents) == [text for n, text in enumerate(whole) if n not in (3, 7)]
    said = capsys.readouterr().err
    assert "2 of 12 prompts were not answered and are left out" in said
    assert "HTTP 400: made up for a test (400); to ask them again, delete " in said
    sound = serve()
    assert texts(answer(sound)) == texts(documents) and not sound.asked
    (note,) = tmp_path.rglob("*.failed")
    assert str(note) in said
    note.unlink()
    assert texts(answer(sound)) == whole and len(sound.asked) == 2


def test_what_a_dead_engine_did_not_answer_is_asked_again(
    answer: ServedResponse, serve: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    """Its last prompts, too few for `IN_A_ROW`, are not left out: none of them was refused."""

    def dying(number: int, reply: dict[str, Any]) -> dict[str, Any] | None:
        if number < PROMPTS - 3:
            return reply
        engine.get = lambda _: 503  # type: ignore[method-assign]
        return None

    engine = serve(dying)
    with pytest.raises(UserError, match=r"no engine answers any more .*received before is kept"):
        answer(engine, batch=1)
    assert not list(tmp_path.rglob("*.failed"))
    sound = serve()
    assert texts(answer(sound)) == texts(answer()) and len(sound.asked) == 3


@pytest.mark.parametrize("in_a_row", [20, 1])
def test_refused_prompts_that_a_run_left_over_do_not_end_the_next(
    answer: ServedResponse,
    serve: Callable[..., FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    in_a_row: int,
) -> None:
    """A run is killed before it notes the two that were refused, and begun again; if they are too
    many in a row, each run notes some of them."""
    answer(serve(), count=PROMPTS - 2)
    monkeypatch.setattr(server_pool, "IN_A_ROW", in_a_row)
    refusing = serve(lambda number, reply: 400)
    for _ in range(2 if in_a_row == 1 else 0):
        with pytest.raises(UserError, match="1 requests in a row failed"):
            answer(refusing, batch=1)
    assert texts(answer(refusing, batch=1)) == texts(answer(count=PROMPTS - 2))
    assert len({*refusing.prompts}) == 2  # a thread may have asked for the next one already


def changed(**more: Any) -> Fault:
    """A fault that changes the choice of every reply."""

    def fault(_: int, reply: dict[str, Any]) -> dict[str, Any]:
        return {**reply, "choices": [{**reply["choices"][0], **more}]}

    return fault


GARBAGE: dict[str, tuple[Fault, str]] = {
    "other prompt": (changed(prompt_token_ids=[1, 2, 3]), "the engine read other tokens than"),
    "ids beyond": (changed(token_ids=[5, 10**6]), "ids outside the target's vocabulary of"),
    "ids below": (changed(token_ids=[-1]), "ids outside the target's vocabulary"),
    "no numbers": (changed(token_ids=["a"]), "ids outside the target's vocabulary"),
    "no ids": (changed(token_ids=[]), "no prompt was answered.* an empty response"),
    "broken off": (changed(finish_reason="abort"), "broken off .finish_reason 'abort'"),
    "no choices": (lambda _, reply: {"choices": []}, "not of OpenAI's form"),
    "a list": (lambda _, reply: [1], "not of OpenAI's form"),  # type: ignore[dict-item,return-value]
    "no text": (changed(token_ids=None, text=None), "without ids and without text"),
    "a page": (lambda _, reply: "<html>busy", "not of OpenAI's form"),  # type: ignore[dict-item,return-value]
    "a text for a choice": (lambda _, reply: {"choices": ["a"]}, "not of OpenAI's form"),
    "constant": (changed(token_ids=[20] * 8), "of 64 tokens .* greedily, only .* likeliest"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_told_in_one_line(
    answer: ServedResponse, serve: Callable[..., FakeEngine], name: str
) -> None:
    fault, message = GARBAGE[name]
    with pytest.raises(UserError, match=message) as error:
        answer(serve(fault))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_model_is_told(
    answer: ServedResponse, serve: Callable[..., FakeEngine], tmp_path: Path, temperature: float
) -> None:
    """With the same tokenizer, so that only what it says tells it apart."""
    other = TargetLoader(TargetConfig(str(save_target(tmp_path / "other", seed=3)), "float32"))
    with pytest.raises(UserError, match="the engine serves another model"):
        answer(serve(of=other.whole()), temperature=temperature)
    sound = serve()
    answer(sound, temperature=temperature)
    assert len(sound.asked) == PROMPTS, "none of the other model's responses was kept"


def test_each_server_is_compared_and_the_sound_one_s_responses_are_kept(
    answer: ServedResponse, serve: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    """The other model answers once the sound one was asked for the prompts that it has not taken
    itself, so that the first eight responses are all sound; before, all that it wrote after these
    was believed."""
    other = TargetLoader(TargetConfig(str(save_target(tmp_path / "other", seed=3)), "float32"))
    sound, before = serve(), texts(answer())

    def slow(number: int, reply: dict[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + 60
        while len(sound.asked) < PROMPTS - 2 and time.monotonic() < until:  # it takes two at once
            time.sleep(0.005)
        return reply

    wrong = serve(slow, of=other.whole())
    with pytest.raises(UserError, match=f"{wrong.url}: .*the engine serves another model"):
        answer(sound, wrong, batch=4)
    assert wrong.asked
    rest = serve()
    assert texts(answer(rest)) == before, "nothing of the other model was kept"
    assert len(rest.asked) < PROMPTS, "what the sound server wrote was kept"


def test_a_server_that_changes_its_model_is_found_and_its_last_results_are_dropped() -> None:
    """Enumerated: 4 are compared, 6 are kept, and the next 4 are compared again."""
    server, kept, dropped = Server("http://a/v1"), list[int](), list[int]()

    def compare(_: Server, results: Mapping[int, int]) -> None:
        require(all(results.values()), "another model")

    results = CheckedServerResults[int, int](
        compare, lambda _s, n, _r: kept.append(n), lambda _s, names: dropped.extend(names)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_responses, "COMPARED", 4)
        patch.setattr(engine_responses, "AGAIN", 6)
        for n in range(13):
            results.take(server, n, 1)
            assert kept == [*range(4 * (n // 4) if n < 4 else min(n + 1, 10))] or n == 3
        with pytest.raises(UserError, match=r"another model; .* last compared \(6\) is dropped"):
            results.take(server, 13, 0)
    assert kept == [*range(10)] and dropped == [*range(4, 10)]


def test_what_is_wrong_at_once_is_told_before_any_prompt_is_asked(
    answer: ServedResponse, serve: Callable[..., FakeEngine]
) -> None:
    engine = serve(room=20)
    with pytest.raises(UserError, match="the engine takes 20: serve with --max-model-len"):
        answer(engine)
    engine.models = [{"id": "a"}, {"id": "b"}]
    with pytest.raises(UserError, match="serves a, b: serve the target alone, or under the name"):
        answer(engine)
    engine.models.append({"id": engine.target.name})
    assert len(answer(engine, count=2)) == 2
    engine.stop()
    with pytest.raises(UserError, match=r"no engine answers at .*refused"):
        answer(engine, max_new_tokens=9)


def test_text_is_believed_where_the_prompt_is_proven_a_prefix(
    answer: ServedResponse,
    serve: Callable[..., FakeEngine],
    target: TargetLoader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The random target writes no words with spaces between them, so the text is made up."""
    monkeypatch.setattr(engine_responses, "require_same_model", lambda *_: None)

    def fault(_: int, reply: dict[str, Any]) -> dict[str, Any]:
        return {**reply, "choices": [{"text": "may run", "finish_reason": "stop"}]}

    wanted = [*target.parts.tokenizer("may run")["input_ids"], *target.parts.eos]
    documents = answer(serve(fault))
    assert [d.ids[d.mask].tolist() for d in documents] == [wanted] * PROMPTS


def test_ids_of_texts(target: TargetLoader) -> None:
    parts = target.parts
    tokenizer, (end,) = parts.tokenizer, parts.eos
    prompt, response = tokenizer("one cat ")["input_ids"], tokenizer("may run")["input_ids"]

    def ids(text: str, reason: str = "stop", limit: int = 9) -> list[int]:
        choice = {"text": text, "finish_reason": reason}
        return ids_of(Vllm().completion({"choices": [choice]}), prompt, parts, limit)

    for text in ("may run", "may run<|im_end|>", "may run<|im_end|> dog"):
        assert ids(text) == [*response, end]
    assert ids("may run", "length") == response and ids("may run", limit=1) == response[:1]
    joined = tokenizer("cat")["input_ids"] * 2  # written as one word, which is unknown
    with pytest.raises(client.RequestRejected, match="do not begin with the prompt's"):
        reply = {"choices": [{"text": "t", "finish_reason": "stop"}]}
        ids_of(Vllm().completion(reply), joined, parts, 9)


def test_an_engine_that_strips_the_stop_id_gives_responses_with_an_end(
    answer: ServedResponse,
    serve: Callable[..., FakeEngine],
    target: TargetLoader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ids and as text, alone and with several ids that end a response, of which the engine may
    say which one it was. Responses that are cut at the limit get no end."""
    monkeypatch.setattr(engine_responses, "require_same_model", lambda *_: None)
    parts = target.parts
    (end,) = parts.eos
    response_of = parts.tokenizer("may run")["input_ids"]

    def fault(number: int, reply: dict[str, Any]) -> dict[str, Any]:
        reason = "length" if number % 2 else "stop"
        return {**reply, "choices": [{"token_ids": response_of, "finish_reason": reason}]}

    written = [d.ids[d.mask].tolist() for d in answer(serve(fault), batch=1)]
    assert sorted(written) == sorted([response_of, [*response_of, end]] * (PROMPTS // 2))

    def ids(limit: int = 9, **more: Any) -> list[int]:
        choice = {"token_ids": response_of, "finish_reason": "stop", **more}
        return ids_of(Vllm().completion({"choices": [choice]}), [5], parts, limit)

    assert ids() == [*response_of, end] and ids(len(response_of)) == response_of
    assert ids(token_ids=[*response_of, end]) == [*response_of, end] and ids(token_ids=[]) == [end]
    config, first = parts.model.generation_config, parts.vocab_size - 1
    monkeypatch.setattr(config, "eos_token_id", [first, end])
    assert ids() == [*response_of, end]  # with which the template ends a response
    assert ids(stop_reason=first) == [*response_of, first]
    assert ids(stop_reason=7) == ids(stop_reason="x") == [*response_of, end]
    monkeypatch.setattr(config, "eos_token_id", None)
    monkeypatch.setattr(parts, "tokenizer", None)
    with pytest.raises(UserError, match="set eos_token_id in its generation_config"):
        ids()


def test_a_job_reads_the_setting(
    tiny: Tiny, tmp_path: Path, serve: Callable[..., FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    """responses.from= of one server or of several, and what cannot be combined with it."""
    urls = "http://a:8000/v1", "http://[::1]:8001"
    given = compose(
        tiny.overrides("ngram", "data.responses=target", f"responses.from={','.join(urls)}")
    )
    assert given.responses.engines == [*urls]
    engine = serve()
    options = ["data.responses=target", f"responses.from={engine.url}", "loop.epochs=1"]
    tiny.job(tmp_path / "run", "ngram", *options)
    assert len(engine.asked) == 29
    mistakes = {
        "responses.from=ftp://a": "responses.from=ftp://a: give an engine's address",
        "responses.from=http://a:b/v1": "give an engine's address",
        "responses.from=localhost": "give an engine's address",
    }
    for override, message in mistakes.items():
        require_one_line(told(capsys, tiny.overrides("ngram", override)), message)
    require_one_line(told(capsys, tiny.overrides("ngram", options[1])), "data.responses=data")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["responses"]["engines"] == [engine.url]

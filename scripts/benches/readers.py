"""Checks that training, evaluation, the doctor and the plan read the same data, for random
configurations of data, template, source and split."""

import json
import random
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from benches import tiny
from transformers import AutoTokenizer

from specdec.errors import UserError, require
from specdec.progress import console
from specdec.targets.loading import TargetLoader
from train.data.run_data import DataCounts, measured_prompts
from train.data.sequences import Prompt
from train.diagnosis import diagnose_data
from train.folder import config_of, data_of_run, noted_prompts
from train.pipeline import run
from train.planning import plan_of_run
from train.run_config import composed, register
from train.target_defaults import with_target_defaults

TURN = "<|im_start|>{{ m.role }} {{ m.content }}<|end|>"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"
THOUGHT = "{% if enable_thinking is defined and not enable_thinking %}ba . {% endif %}"
TEMPLATES = {  # kinds of chat templates
    "plain": "{% for m in messages %}" + TURN + "{% endfor %}" + ASK,
    "content parts": "{% for m in messages %}<|im_start|>{{ m.role }} " + PARTS + "<|end|>"
    "{% endfor %}" + ASK,
    "default system": "{% if messages[0].role != 'system' %}<|im_start|>system be .<|end|>"
    "{% endif %}{% for m in messages %}" + TURN + "{% endfor %}" + ASK,
    "thought": "{% for m in messages %}"
    + TURN
    + "{% endfor %}"
    + ASK.replace("assistant ", "assistant " + THOUGHT),
    "blocks": "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}" + ASK,
    "argument": "{{ effort | default('bi') }}.{% for m in messages %}"
    + TURN
    + "{% endfor %}"
    + ASK,
}
ALL = 1 << 30
Value = str | int | float | None


@dataclass
class ReadingOutcome:
    """The results of the readers of one configuration, by their names: how much they read and the
    decoder's prompts, or why they reject the data."""

    settings: Sequence[str]
    read: dict[str, tuple[DataCounts, str] | str] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        return len({str(said) for said in self.read.values()}) == 1

    @property
    def rejected(self) -> bool:
        return any(isinstance(said, str) for said in self.read.values())


def readers(
    *,
    count: Annotated[int, "random configurations"] = 300,
    seed: Annotated[int, "of the configurations"] = 1,
) -> None:
    """Random configurations: train, evaluate, doctor and plan report the same prompts and counts.

    Each configuration draws data (chats, tools, arguments, broken and repeated records, rows of
    token ids, pairs, texts), a chat template, sources (a file, a folder, several with and without
    weights, shuffled) and a split, and is run on a tiny random target with a draft that needs no
    training. The run, an evaluation of its folder with and without its records, the doctor and the
    plan must agree on every prompt, token and count, or all reject the data.
    """
    with TemporaryDirectory() as temporary:
        found = outcomes(Path(temporary), count, seed)
    wrong = [outcome for outcome in found if not outcome.agrees]
    for outcome in wrong:
        console.print(" ".join(outcome.settings))
        for name, said in outcome.read.items():
            console.print(f"  {name}: {said if isinstance(said, str) else said[0]}", markup=False)
    rejected = sum(outcome.rejected for outcome in found)
    counts = [said[0] for x in found if not isinstance(said := x.read["train"], str)]
    console.print(
        f"{len(found)} configurations: {len(found) - rejected} read and {rejected} rejected; "
        f"{len(wrong)} of them differently by train, evaluate, doctor and plan\n"
        f"the runs train on {sum(x.train for x in counts):,} texts and measure on "
        f"{sum(x.prompts for x in counts):,} prompts"
    )
    require(not wrong, f"{len(wrong)} of {len(found)} configurations are read differently")


def outcomes(place: Path, count: int, seed: int) -> list[ReadingOutcome]:
    """The outcomes of random configurations, with their files in `place`."""
    register()
    draw, found = random.Random(seed), list[ReadingOutcome]()
    targets = {name: _target(place / name.replace(" ", "-"), x) for name, x in TEMPLATES.items()}
    for n in range(count):
        folder = place / f"{n}"
        settings = drawn(draw, folder, targets[draw.choice([*targets])])
        found.append(_outcome(folder, settings))
    return found


def _target(folder: Path, template: str) -> Path:
    """A tiny random target with this chat template."""
    llama = next(x for x in tiny.architectures() if x.kind == "llama")
    folder.mkdir()
    with redirect_stderr(StringIO()):  # bars of the saving
        tiny.save(llama, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def drawn(draw: random.Random, folder: Path, target: Path) -> list[str]:
    """The settings of a random configuration, whose data is written to `folder`."""
    folder.mkdir()
    kind = draw.choice(["chats", "chats", "chats", "prompts", "tokens", "pairs", "texts"])
    responses = "target" if kind == "prompts" else draw.choice(["data", "target"])
    settings = [f"target.path={target}", f"data.responses={responses}"]
    several = kind in ("chats", "tokens") and draw.random() < 0.5
    files = [_written(draw, folder / f"{i}", kind, i) for i in range(3 if several else 1)]
    if several and draw.random() < 0.7:
        weighs = draw.random() < 0.6
        sources = [
            f"{{path:'{file}'" + f",weight:{draw.choice([1, 2, 0.5])}" * weighs + "}"
            for file in files
        ]
        settings += ["data.path=''", f"data.sources=[{','.join(sources)}]"]
    else:
        settings.append(f"data.path={folder / 'data' if several else files[0]}")
        for file in files if several else ():
            (folder / "data").mkdir(exist_ok=True)
            file.rename(folder / "data" / f"{file.parent.name}{file.suffix}")
    if kind in ("tokens", "pairs", "texts"):
        formats = {"tokens": "tokens", "pairs": "pairs"}
        settings.append(f"data.format={formats.get(kind) or draw.choice(['lines', 'paragraphs'])}")
    drawn_of: dict[str, list[Value]] = {
        "data.held_out": [None, None, 0.2, 0.4],
        "data.validation": [None, None, 0, 0.3],
        "data.limit": [None, None, 15, 40],
        "data.records": [None, None, None, 50],
        "data.shuffle": [0, 0, 7],
        "data.seed": [0, 3],
        "data.max_prompt": [30, 60, 128],
        "data.max_length": [90, 128, 200],
        "data.min_response": [1, 4, 20],
        "data.too_long": ["drop", "truncate"],
        "data.thinking": ["template", "template", "on", "off", "mixed", "data"],
    }
    for name, values in drawn_of.items():
        value = draw.choice(values)
        settings.append(f"{name}={'null' if value is None else value}")
    return [*FIXED, f"name=readers-{folder.name}", *settings]


FIXED = ["drafter=ngram", "target=model", "data=conversations", "target.device=cpu"]
FIXED += ["target.dtype=float32", "decode.prompts=0", "decode.max_new_tokens=2", "export=null"]

FIXED += ["responses.max_new_tokens=4", "data.date=2026-01-31", "planning.device=l4"]


def _written(draw: random.Random, folder: Path, kind: str, seed: int) -> Path:
    """A file of random data of a kind."""
    folder.mkdir()
    known = tiny.words()[:60]

    def said(most: int) -> str:
        return " ".join(draw.choices(known, k=draw.randint(1, most))) + "."

    openings = [said(12) for _ in range(draw.randint(6, 30))]
    file = folder / ("data.txt" if kind == "texts" else "data.jsonl")
    lines = list[str]()
    for n in range(draw.randint(12, 90)):
        opening = draw.choice(openings) if draw.random() < 0.3 else said(12)
        if kind == "texts":
            lines.append(f"{opening} {said(30)}\n" + said(20) * draw.randint(0, 1) + "\n")
            continue
        if kind == "pairs":
            lines.append(json.dumps({"source": opening, "target": said(20)}))
            continue
        if kind == "tokens":
            ids = [draw.randrange(10, 90) for _ in range(draw.randint(4, 70))]
            asked = draw.randrange(1, len(ids))
            labels = [-100] * asked + ids[asked:]
            lines.append(json.dumps({"id": f"{seed}-{n}", "input_ids": ids, "labels": labels}))
            continue
        if draw.random() < 0.08:
            lines.append(draw.choice(['{"broken', '{"x": 1}', '{"messages": []}']))
            continue
        lines.append(json.dumps(_chat(draw, f"{seed}-{n}", opening, said, kind == "prompts")))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _chat(
    draw: random.Random, name: str, opening: str, said: Callable[[int], str], alone: bool
) -> dict[str, Any]:
    """A record of a chat, with fields of requests to servers."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": opening}]
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        turns += [{"role": "assistant", "content": said(25)}, {"role": "user", "content": said(9)}]
    turns = turns[: 1 if alone else draw.choice([len(turns), len(turns) - 1])]
    if draw.random() < 0.2:
        turns.insert(0, {"role": "system", "content": draw.choice(["", said(4)])})
    if draw.random() < 0.1 and not alone:
        turns[-1]["content"] = draw.choice(["", "no <|end|>", "long " * 300])
    record: dict[str, Any] = {"id": name, "messages": turns}
    if draw.random() < 0.1:
        record["chat_template_kwargs"] = {"effort": "bo"}
    if draw.random() < 0.1:
        record["enable_thinking"] = draw.random() < 0.5
    if draw.random() < 0.03:
        function = {"name": "bada", "parameters": {}}
        record["tools"] = [{"type": "function", "function": function}]
    return record


def _outcome(folder: Path, settings: Sequence[str]) -> ReadingOutcome:
    cfg, outcome, silent = composed(settings), ReadingOutcome(settings), StringIO()
    responses = [f"responses.root={folder / 'responses'}"]
    cfg, _ = with_target_defaults(composed([*settings, *responses]))
    place, target = folder / "run", TargetLoader(cfg.target).parts
    tokenizer = target.tokenizer

    def of_run() -> tuple[DataCounts, str]:
        run(cfg, place)
        noted = noted_prompts(place, ALL)
        require(noted is not None, f"{place} notes no prompts")
        assert noted is not None
        return DataCounts(**config_of(place)["read"]), _text([*noted[0], *noted[1]])

    def of_evaluation() -> tuple[DataCounts, str]:
        """Read the data again, as an evaluation does if a run recorded no prompts."""
        parts = measured_prompts(data_of_run(place), tokenizer, ALL, ALL)
        return DataCounts(**config_of(place)["read"]), _text([*parts[0], *parts[1]])

    def of_doctor() -> tuple[DataCounts, str]:
        diagnosis = diagnose_data(
            cfg.data, target, None, 1, cfg.response_generation, cfg.drafter.depth
        )
        unusable = [x for x in diagnosis.faults if "stop token" not in x and "mask" not in x]
        require(not unusable, "".join(unusable[:1]))
        return diagnosis.counts, _text(diagnosis.prompts)

    def of_plan() -> tuple[DataCounts, str]:
        split = plan_of_run(cfg).facts.data.split
        assert split is not None
        return DataCounts.of_split(split), _text([*split.prompts, *split.validation_prompts])

    calls = {"train": of_run, "evaluate": of_evaluation, "doctor": of_doctor, "plan": of_plan}
    for name, call in calls.items():
        if name == "evaluate" and outcome.rejected:
            continue  # there is no run to evaluate
        try:
            with console.capture(), redirect_stdout(silent), redirect_stderr(silent):
                outcome.read[name] = call()
        except UserError as error:
            outcome.read[name] = str(error)
    return outcome


def _text(prompts: Sequence[Prompt]) -> str:
    return json.dumps([prompt.ids.tolist() for prompt in prompts])

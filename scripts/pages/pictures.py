"""The pictures of the site, drawn from files of results or from the examples of concepts.md."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pages.drawing import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, YELLOW, Drawing, width_of
from pages.results_page import FOLDER, Cell, tables
from rich.console import Console
from rich.style import Style
from rich.text import Text

from specdec.theory.leviathan import expected_tokens, walltime_factor

PICTURES = FOLDER.parent / "pictures"


def pictures() -> dict[Path, Callable[[], str]]:
    """The function that draws each file."""
    drawn: tuple[Callable[[], str], ...]
    drawn = (speedups, families, pipeline, speculation_step, alpha, anchors, shapes)
    drawn += (terminal, speedup_by_alpha, decision)
    return {PICTURES / f"{draw.__name__}.svg": draw for draw in drawn}


def figures(cell: Cell) -> list[float]:
    """The value and interval of a cell, for a bar."""
    assert isinstance(cell, list)
    return [float(x) for x in cell]


def speedups() -> str:
    """The quickstart's speedups with their intervals, over vanilla decoding."""
    table = tables()["01-quickstart"]
    names = [column.name for column in table.columns]
    (run,) = table.runs
    d = Drawing(760, 318, f"{table.claim}, with 95 % intervals")
    d.text(20, 28, "Speedup of the quickstart's head over vanilla decoding", size=15)
    left, scale = 250, 220

    def across(value: float) -> float:
        return left + scale * value

    for tick in (0.0, 0.5, 1.0, 1.5, 2.0):
        d.line(across(tick), 46, across(tick), 278, PALE, width=1)
        d.text(across(tick), 295, f"{tick:g}", at="middle", ink=GREY)
    y = 54.0
    for row in run.rows:
        words = str(row[0])
        if words.startswith("T = 1") and y < 160:
            y += 14
        value, low, high = figures(row[names.index("speedup")])
        ink = BLUE if words.startswith("T = 0") else ORANGE
        d.text(left - 10, y + 19, words.replace("the fastest topology: ", ""), at="end")
        d.box(left, y + 4, scale * value, 22, ink, fill=ink, round=2)
        d.line(across(low), y + 15, across(high), y + 15, INK)
        for end in (low, high):
            d.line(across(end), y + 10, across(end), y + 20, INK)
        d.text(across(high) + 8, y + 19, f"{value:.2f}")
        y += 35
    d.line(across(1), 46, across(1), 278, INK)
    d.text(across(1), 310, "vanilla decoding", size=12, at="middle", ink=GREY)
    return d.svg()


def families() -> str:
    """τ of chains and of trees at T = 0 for all drafting methods at equal training tokens."""
    table = tables()["07-families"]
    names = [column.name for column in table.columns]
    chain, tree = names.index("τ of chains, T = 0"), names.index("τ of trees, T = 0")
    rows = [row for run in table.runs for row in run.rows if figures(row[chain])[0] < 3]
    rows.sort(key=lambda row: -max(figures(row[i])[0] for i in (chain, tree) if row[i]))
    left, scale, step = 110, 560, 26
    d = Drawing(760, 96 + step * len(rows), f"{table.claim}: τ at T = 0 of chains and of trees")
    d.text(20, 28, "Mean acceptance length τ at T = 0, after 40,000 training tokens", size=15)

    def across(value: float) -> float:
        return left + scale * (value - 1)

    bottom = 64 + step * len(rows)
    for tick in (1.0, 1.2, 1.4, 1.6, 1.8, 2.0):
        d.line(across(tick), 58, across(tick), bottom, PALE, width=1)
        d.text(across(tick), bottom + 18, f"{tick:g}", at="middle", ink=GREY)
    for x, ink, words in ((left, BLUE, "chains of 3 tokens"), (300, ORANGE, "trees of 12 nodes")):
        d.box(x, 40, 10, 10, ink, fill=ink, round=5)
        d.text(x + 16, 50, words, ink=GREY)
    for i, row in enumerate(rows):
        y = 74 + step * i
        d.text(left - 10, y + 4, str(row[0]), at="end")
        for at, ink, shift in ((chain, BLUE, -4), (tree, ORANGE, 4)):
            if row[at] is not None:
                value, low, high = figures(row[at])
                d.line(across(low), y + shift, across(high), y + shift, ink, width=2)
                d.box(across(value) - 4, y + shift - 4, 8, 8, ink, fill=ink)
    return d.svg()


STAGES = (  # product, its source or user, its file, and the flag that moves it into an engine
    ("Traffic", "your conversations", "chats.jsonl", "", GREY),
    ("Responses", "by the target", "cache/responses", "responses.from=", BLUE),
    ("Hidden states", "of the target", "cache/hidden_states", "hidden_states.from=", BLUE),
    ("Draft", "trained on them", "runs/NAME/best", "", GREEN),
    ("Report", "α, τ, speedup", "report/report.html", "evaluate --engine", YELLOW),
    ("Export", "for engines", "runs/NAME/export", "serves it", YELLOW),
)


def pipeline() -> str:
    """The stages of a run, their files, and the stages that an engine can take over."""
    d = Drawing(960, 168, "The stages of a run, where each is kept, and what an engine can do")
    left, pitch, width = 104, 142, 126
    for y, words in ((48, "train.py"), (64, "runs all"), (112, "kept in"), (142, "in an engine")):
        d.text(14, y, words, size=12, ink=GREY)
    for i, (stage, words, file, engine, ink) in enumerate(STAGES):
        x = left + pitch * i
        middle = x + width / 2
        d.box(x, 24, width, 58, ink)
        d.inside(x, 49, width, stage, size=14)
        d.inside(x, 68, width, words, size=11, ink=GREY)
        if i:
            d.arrow(x + width - pitch + 1, 53, x - 2, 53)
        d.text(middle, 112, file, size=11, at="middle")
        d.text(middle, 142, engine, size=11, at="middle", ink=BLUE)
    d.line(14, 122, 946, 122, PALE, width=1)
    return d.svg()


def speculation_step() -> str:
    """One speculation step: drafted tokens, one forward pass of the target, the tokens kept."""
    d = Drawing(
        840, 270, "One speculation step: the draft proposes, one pass of the target verifies"
    )
    left, pitch = 200, 76
    for i, word in enumerate(["The", "sky", "is"]):
        d.token(left + pitch * i, 40, 70, word, GREY if i < 2 else BLUE)
    d.text(20, 60, "the text so far")
    d.text(left + 2 * pitch + 35, 32, "anchor", size=12, at="middle", ink=BLUE)
    d.text(20, 124, "the draft proposes")
    drafted = left + 3 * pitch
    for i, word in enumerate(["blue", "because", "of"]):
        d.token(drafted + pitch * i, 104, 70, word, GREY)
        d.text(drafted + pitch * i + 35, 98, f"depth {i}", size=11, at="middle", ink=GREY)
    d.arrow(left + 2 * pitch + 40, 72, drafted - 4, 114)
    d.text(20, 174, "one forward pass")
    d.text(20, 190, "of the target verifies")
    kept = (("blue", GREEN, False), ("because", RED, True), ("of", RED, True))
    for i, (word, ink, struck) in enumerate(kept):
        d.token(drafted + pitch * i, 160, 70, word, ink, struck)
        d.arrow(drafted + pitch * i + 35, 136, drafted + pitch * i + 35, 157)
    for y, words, ink in ((168, "accepted,", GREEN), (186, "then rejected", RED)):
        d.text(drafted + 3 * pitch + 8, y + 2, words, size=12, ink=ink)
    d.text(20, 230, "the text afterwards")
    after = (("The", GREY), ("sky", GREY), ("is", GREY), ("blue", GREEN), ("when", YELLOW))
    for i, (word, ink) in enumerate(after):
        d.token(left + pitch * i, 210, 70, word, ink)
    d.text(left + 5 * pitch + 8, 222, "2 tokens for one pass;", size=12, ink=GREY)
    d.text(left + 5 * pitch + 8, 238, "“when” is the next anchor", size=12, ink=GREY)
    return d.svg()


def alpha() -> str:
    """p and q over five tokens, and the three variants of β at this position."""
    p, q = (0.40, 0.30, 0.15, 0.10, 0.05), (0.25, 0.45, 0.20, 0.05, 0.05)
    words = ("blue", "clear", "dark", "so", "the")
    d = Drawing(820, 300, "Acceptance at one position in its three variants")
    d.text(20, 28, "p of the target and q of the draft at one position", size=15)
    base, scale = 240, 400
    for i, (word, of_p, of_q) in enumerate(zip(words, p, q, strict=True)):
        x = 40 + 76 * i
        d.box(x, base - scale * of_p, 26, scale * of_p, BLUE, fill="none", round=0)
        d.box(x + 28, base - scale * of_q, 26, scale * of_q, ORANGE, fill="none", round=0)
        both = scale * min(of_p, of_q)
        d.box(x, base - both, 26, both, BLUE, round=0)
        d.box(x + 28, base - both, 26, both, ORANGE, round=0)
        for shift, value, ink in ((12, of_p, BLUE), (42, of_q, ORANGE)):
            y = base - scale * value - 5
            d.text(x + shift, y, f"{value:.2f}", size=11, at="middle", ink=ink)
        d.text(x + 27, base + 18, word, at="middle")
    d.line(30, base, 420, base, INK)
    for x, ink, letter in ((40, BLUE, "p, the target"), (170, ORANGE, "q, the draft")):
        d.box(x, 272, 12, 12, ink, fill=ink, round=2)
        d.text(x + 18, 283, letter, ink=GREY)
    d.text(290, 283, "shaded: min(p, q)", ink=GREY)
    sampled = sum(map(min, p, q))
    drafted = max(range(len(q)), key=q.__getitem__)
    agree = int(drafted == max(range(len(p)), key=p.__getitem__))
    told = (
        ("sampled", f"Σ min(p, q) = {sampled:.2f}", "the draft draws from q"),
        (
            "greedy-draft",
            f"p(argmax q) = p({words[drafted]}) = {p[drafted]:.2f}",
            "T > 0, the draft takes its likeliest token",
        ),
        ("greedy", f"argmax p = argmax q? {'yes: 1' if agree else 'no: 0'}", "T = 0"),
    )
    for i, (name, value, when) in enumerate(told):
        y = 70 + 66 * i
        d.box(450, y - 18, 350, 54, GREY)
        d.text(462, y + 2, f"{name}: {value}")
        d.text(462, y + 22, when, size=12, ink=GREY)
    return d.svg()


def anchors() -> str:
    """Anchors of a text in training, and those that a decoder visits; prompt tokens are marked."""
    d = Drawing(
        884, 234, "Anchors in training and in decoding; tokens of the prompt are anchors of neither"
    )
    prompt = ["Why", "is", "the", "sky", "blue", "?"]
    response = ["Because", "air", "scatters", "blue", "light", "most"]
    words, last = [*prompt, *response], len(prompt) - 1
    pitch, width = 70, 66
    rows = (
        (46, "training: each position before a token of the response", range(last, len(words) - 1)),
        (146, "decoding: the positions where speculation steps begin", (last + 1, last + 3)),
    )
    for y, label, at_anchor in rows:
        d.text(22, y - 12, label)
        for i, word in enumerate(words):
            here = i in at_anchor
            x = 22 + pitch * i
            if i <= last:
                d.box(x, y, width, 30, BLUE if here else PALE, fill="" if here else "white")
                d.inside(x, y + 20, width, word, ink=INK if here else GREY)
            else:
                d.token(x, y, width, word, BLUE if here else GREY)
        for start, stop, name in ((0, last, "prompt"), (last + 1, len(words) - 1, "response")):
            left, right = 22 + pitch * start, 22 + pitch * stop + width
            d.line(left, y + 36, right, y + 36, GREY, width=1)
            d.text((left + right) / 2, y + 49, name, size=11, at="middle", ink=GREY)
    below = "Blue: anchors. The step at “Because” drafts “air of”; the target corrects “of”."
    d.text(22, 222, below, size=12)
    return d.svg()


def shapes() -> str:
    """A chain and a tree of drafted tokens, verified in one pass each."""
    d = Drawing(760, 210, "A chain of three tokens, and a tree of six")
    d.text(20, 28, "a chain, γ = 3", size=14)
    for i, word in enumerate(["is", "blue", "because", "of"]):
        d.token(20 + 92 * i, 90, 72, word, BLUE if i == 0 else GREEN)
        if i:
            d.arrow(20 + 92 * i - 20, 105, 20 + 92 * i - 2, 105)
    d.text(400, 28, "a tree of 6 nodes", size=14)
    nodes = {
        (): (400, 90, "is"),
        (0,): (490, 50, "blue"),
        (1,): (490, 130, "clear"),
        (0, 0): (580, 30, "because"),
        (0, 1): (580, 70, "when"),
        (1, 0): (580, 130, "today"),
        (0, 0, 0): (670, 30, "of"),
    }
    for path, (x, y, _) in nodes.items():
        if path:
            above = nodes[path[:-1]]
            d.arrow(above[0] + 74, above[1] + 15, x - 2, y + 15)
    for path, (x, y, word) in nodes.items():
        d.token(x, y, 72, word, GREEN if path else BLUE)
    d.text(
        20,
        190,
        "One pass of the target reads all nodes; the longest accepted path is kept.",
        size=12,
        ink=GREY,
    )
    return d.svg()


SAID = Path(__file__).with_name("generate.ansi")  # a terminal session recorded by `script`
PROMPT = '"Which planets orbit the Sun?" --gamma 2 --max-new-tokens 72'
NIGHT, FOREGROUND = "#111827", "#d1d5db"
TERMINAL = {1: "#f87171", 2: "#4ade80", 3: "#facc15", 4: "#60a5fa"}  # by ANSI's numbers
COLUMNS = 84


def terminal() -> str:
    """A recorded answer of scripts/generate, in the colours of a terminal."""
    lines: list[list[Word]] = []
    for text in (
        Text(f"$ scripts/generate runs/quickstart/best {PROMPT}"),
        Text.from_ansi(SAID.read_text(encoding="utf-8")),
    ):
        for line in text.split("\n"):
            lines += wrapped(words_of(line))
    advance, step = width_of("x", 13, mono=True), 21
    d = Drawing(
        round(40 + COLUMNS * advance),
        34 + step * len(lines),
        "scripts/generate: accepted drafts are green, corrections yellow, rejected drafts struck",
    )
    d.box(0, 0, d.width, d.height, NIGHT, fill=NIGHT, round=8)
    for i, words in enumerate(lines):
        column = 0
        for word in words:
            start = column + len(word.text) - len(word.text.lstrip())
            if text := word.text.strip():
                x, y = 20 + advance * start, 30 + step * i
                d.text(x, y, text, ink=word.ink, mono=True, struck=word.struck)
            column += len(word.text)
    return d.svg()


class Word(NamedTuple):
    text: str  # with the space before it
    ink: str = FOREGROUND
    struck: bool = False


def words_of(line: Text) -> list[Word]:
    """The words of a line with their styles."""
    words = []
    for segment in line.render(Console(color_system="standard")):
        style = segment.style or Style.null()
        number = style.color.number if style.color else None
        ink = TERMINAL.get(number, FOREGROUND) if number else FOREGROUND
        parts = re.findall(r"\s*\S+|\s+$", segment.text.rstrip("\n"))
        words += [Word(part, ink, bool(style.strike)) for part in parts]
    return words


def wrapped(words: list[Word]) -> list[list[Word]]:
    """The words in lines of `COLUMNS`."""
    lines: list[list[Word]] = []
    column = COLUMNS
    for word in words:
        if column + len(word.text) > COLUMNS:
            lines.append([])
            word, column = word._replace(text=word.text.lstrip()), 0
        lines[-1].append(word)
        column += len(word.text)
    return lines


GAMMAS = {1: GREY, 2: BLUE, 3: GREEN, 5: YELLOW, 7: RED}


def speedup_by_alpha() -> str:
    """The predicted speedup against α for some γ at two costs, and the quickstart's chains."""
    d = Drawing(880, 400, "Predicted speedup against the acceptance rate α, by draft length γ")
    d.text(20, 28, "Predicted speedup of chains: τ / (γc + v), with c = 0.05", size=15)
    table = tables()["01-quickstart"]
    names = [column.name for column in table.columns]
    row = table.runs[0].rows[0]
    gamma = 2
    assert row[0] == f"T = 0, chains of {gamma} tokens"
    tau = figures(row[names.index("τ")])[0]
    speedup, low, high = figures(row[names.index("speedup")])
    for left, v, words in ((56, 1.1, "memory-bound: v = 1.1"), (484, 1.3, "a small CPU: v = 1.3")):

        def at(alpha: float, factor: float, left: int = left) -> tuple[float, float]:
            return left + 340 * (alpha - 0.1) / 0.8, 350 - 280 * (factor - 0.5) / 3.5

        d.text(left + 10, 62, words)
        for tick in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0):
            _, y = at(0, tick)
            d.line(left, y, left + 340, y, INK if tick == 1 else PALE, width=1)
            d.text(left - 8, y + 4, f"{tick:g}", size=11, at="end", ink=GREY)
        for tick in (0.1, 0.3, 0.5, 0.7, 0.9):
            x, _ = at(tick, 0)
            d.text(x, 368, f"{tick:g}", size=11, at="middle", ink=GREY)
        d.text(left + 170, 386, "α, alike at all depths", size=12, at="middle", ink=GREY)
        for length, ink in GAMMAS.items():
            alphas = [0.1 + 0.8 * i / 40 for i in range(41)]
            d.curve([at(a, walltime_factor(a, length, 0.05, v)) for a in alphas], ink)
            x, y = at(0.9, walltime_factor(0.9, length, 0.05, v))
            d.text(x + 6, y + 4, f"γ = {length}", size=12, ink=ink)
        x, y = at(alpha_of(tau, gamma), speedup)
        d.line(x, at(0, low)[1], x, at(0, high)[1], INK)
        d.box(x - 5, y - 5, 10, 10, INK, fill=ORANGE, round=5)
        d.line(x - 4, y - 10, x - 30, 186, GREY, width=1)
        d.text(left + 12, 166, "quickstart, γ = 2:", size=12, ink=ORANGE)
        d.text(left + 12, 182, f"τ {tau:.2f}, {speedup:.2f} times", size=12, ink=ORANGE)
    return d.svg()


def alpha_of(tau: float, gamma: int) -> float:
    """The α, equal at all depths, at which chains have this τ."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tau else (low, middle)
    return low


QUESTIONS = Path(__file__).with_name("decision.json")  # the last entry has no question


def decision() -> str:
    """The choice of a drafter: questions from top to bottom, each with the drafter for a yes."""
    *questions, otherwise = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    step, top = 70, 20
    d = Drawing(860, top + step * len(questions) + 62, "Which drafter to choose")

    def answer(x: float, y: float, width: float, entry: dict[str, str]) -> None:
        d.box(x, y, width, 44, GREEN)
        d.inside(x, y + 19, width, entry["drafter"], size=14)
        d.inside(x, y + 36, width, entry["remark"], size=11, ink=GREY)

    for i, entry in enumerate(questions):
        y = top + step * i
        d.box(20, y, 330, 44, GREY)
        d.inside(20, y + 27, 330, entry["question"])
        d.arrow(352, y + 22, 428, y + 22)
        d.text(390, y + 15, "yes", size=12, at="middle", ink=GREY)
        answer(432, y, 408, entry)
        d.arrow(185, y + 45, 185, y + step - 2)
        d.text(196, y + 62, "no", size=12, ink=GREY)
    answer(20, top + step * len(questions), 330, otherwise)
    return d.svg()

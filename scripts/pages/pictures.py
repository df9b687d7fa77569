"""The pictures of the site, drawn from files of results or of what concepts.md explains."""

from collections.abc import Callable
from pathlib import Path

from pages.drawing import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, YELLOW, Drawing
from pages.results_page import FOLDER, Cell, tables

PICTURES = FOLDER.parent / "pictures"


def pictures() -> dict[Path, Callable[[], str]]:
    """What draws each file."""
    drawn = (speedups, families, pipeline, speculation_step, alpha, anchors, shapes)
    return {PICTURES / f"{draw.__name__}.svg": draw for draw in drawn}


def figures(cell: Cell) -> list[float]:
    """A cell's value and interval, which a cell of a bar has."""
    assert isinstance(cell, list)
    return [float(x) for x in cell]


def speedups() -> str:
    """The quickstart's speedups with their intervals, beside plain decoding."""
    table = tables()["01-quickstart"]
    names = [column.name for column in table.columns]
    (run,) = table.runs
    d = Drawing(760, 318, f"{table.claim}, with 95 % intervals")
    d.text(20, 28, "How many times as fast as plain decoding the quickstart's head is", size=15)
    left, scale = 250, 230

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
        d.text(left - 10, y + 19, words.replace("the fastest shape: ", ""), at="end")
        d.box(left, y + 4, scale * value, 22, ink, fill=ink, round=2)
        d.line(across(low), y + 15, across(high), y + 15, INK)
        for end in (low, high):
            d.line(across(end), y + 10, across(end), y + 20, INK)
        d.text(across(high) + 8, y + 19, f"{value:.2f}")
        y += 35
    d.line(across(1), 46, across(1), 278, INK)
    d.text(across(1), 310, "plain decoding", size=12, at="middle", ink=GREY)
    return d.svg()


def families() -> str:
    """τ of chains and of trees at T = 0 for all families at equal training tokens."""
    table = tables()["07-families"]
    names = [column.name for column in table.columns]
    chain, tree = names.index("τ of chains, T = 0"), names.index("τ of trees, T = 0")
    rows = [row for run in table.runs for row in run.rows if figures(row[chain])[0] < 3]
    rows.sort(key=lambda row: -max(figures(row[i])[0] for i in (chain, tree) if row[i]))
    left, scale, step = 110, 560, 26
    d = Drawing(760, 96 + step * len(rows), f"{table.claim}: τ at T = 0 of chains and of trees")
    d.text(
        20, 28, "Tokens that a pass of the target emits (τ) at T = 0, after 40,000 tokens", size=15
    )

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


STAGES = (  # what is made, from what or for whom; where it is kept; how an engine makes it instead
    ("Traffic", "your conversations", "chats.jsonl", "", GREY),
    ("Responses", "by the target", "cache/responses", "responses.from=", BLUE),
    ("Hidden states", "of the target", "cache/hidden_states", "hidden_states.from=", BLUE),
    ("Draft", "trained on them", "runs/NAME/best", "", GREEN),
    ("Report", "α, τ, speedup", "report/report.html", "evaluate --engine", YELLOW),
    ("Export", "for engines", "runs/NAME/export", "serves it", YELLOW),
)


def pipeline() -> str:
    """The stages of a run, their files, and what an engine can do."""
    d = Drawing(900, 168, "The stages of a run, where each is kept, and what an engine can do")
    left, pitch, width = 104, 131, 113
    for y, words in ((48, "train.py"), (64, "runs all"), (112, "kept in"), (142, "in an engine")):
        d.text(14, y, words, size=12, ink=GREY)
    for i, (stage, words, file, engine, ink) in enumerate(STAGES):
        x = left + pitch * i
        middle = x + width / 2
        d.box(x, 24, width, 58, ink)
        d.text(middle, 49, stage, size=14, at="middle")
        d.text(middle, 68, words, size=11, at="middle", ink=GREY)
        if i:
            d.arrow(x + width - pitch + 1, 53, x - 2, 53)
        d.text(middle, 112, file, size=11, at="middle")
        d.text(middle, 142, engine, size=11, at="middle", ink=BLUE)
    d.line(14, 122, 886, 122, PALE, width=1)
    return d.svg()


def speculation_step() -> str:
    """A speculation step of speculative decoding: drafted tokens, one pass of the target, what is
    kept."""
    d = Drawing(
        760, 250, "One speculation step: the draft proposes, one pass of the target verifies"
    )
    words = ["The", "sky", "is"]
    for i, word in enumerate(words):
        d.token(150 + 66 * i, 40, 60, word, GREY if i < 2 else BLUE)
    d.text(20, 60, "the text so far")
    d.text(312, 32, "anchor", size=12, at="middle", ink=BLUE)
    d.text(20, 124, "the draft proposes")
    for i, word in enumerate(["blue", "because", "of"]):
        d.token(348 + 86 * i, 104, 80, word, GREY)
        d.text(388 + 86 * i, 98, f"depth {i}", size=11, at="middle", ink=GREY)
    d.arrow(316, 72, 344, 112)
    d.text(20, 174, "one pass of the target")
    d.text(20, 190, "verifies all of them")
    kept = (("blue", GREEN, False), ("because", RED, True), ("of", RED, True))
    for i, (word, ink, struck) in enumerate(kept):
        d.token(348 + 86 * i, 160, 80, word, ink, struck)
        d.arrow(388 + 86 * i, 136, 388 + 86 * i, 157)
    d.text(20, 230, "the text afterwards")
    after = (("The", GREY), ("sky", GREY), ("is", GREY), ("blue", GREEN), ("when", YELLOW))
    for i, (word, ink) in enumerate(after):
        d.token(150 + 66 * i, 210, 60, word, ink)
    d.text(490, 230, "2 tokens for one pass; “when” is the next anchor", size=12, ink=GREY)
    return d.svg()


def alpha() -> str:
    """p and q over five tokens, and the three variants of β at this position."""
    p, q = (0.40, 0.30, 0.15, 0.10, 0.05), (0.25, 0.45, 0.20, 0.05, 0.05)
    words = ("blue", "clear", "dark", "so", "the")
    d = Drawing(760, 300, "Acceptance at one position in its three variants")
    d.text(20, 28, "p of the target and q of the draft at one position", size=15)
    base, scale = 240, 400
    for i, (word, of_p, of_q) in enumerate(zip(words, p, q, strict=True)):
        x = 40 + 76 * i
        d.box(x, base - scale * of_p, 26, scale * of_p, BLUE, fill="none", round=0)
        d.box(x + 28, base - scale * of_q, 26, scale * of_q, ORANGE, fill="none", round=0)
        both = scale * min(of_p, of_q)
        d.box(x, base - both, 26, both, BLUE, round=0)
        d.box(x + 28, base - both, 26, both, ORANGE, fill="#ffedd5", round=0)
        d.text(x + 13, base - scale * of_p - 5, f"{of_p:.2f}", size=11, at="middle", ink=BLUE)
        d.text(x + 41, base - scale * of_q - 5, f"{of_q:.2f}", size=11, at="middle", ink=ORANGE)
        d.text(x + 27, base + 18, word, at="middle")
    d.line(30, base, 420, base, INK)
    for x, ink, letter in ((40, BLUE, "p, the target"), (160, ORANGE, "q, the draft")):
        d.box(x, 272, 12, 12, ink, fill=ink, round=2)
        d.text(x + 18, 283, letter, ink=GREY)
    d.text(270, 283, "shaded: min(p, q)", ink=GREY)
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
        d.box(450, y - 18, 290, 54, GREY)
        d.text(462, y + 2, f"{name}: {value}")
        d.text(462, y + 22, when, size=12, ink=GREY)
    return d.svg()


def anchors() -> str:
    """All positions of a text as anchors, and those that a decoder visits."""
    d = Drawing(
        760, 190, "Anchors: every position in training, where speculation steps begin in decoding"
    )
    words = ["Why", "is", "the", "sky", "blue", "?", "Because", "air", "scatters"]
    visited = {0, 2, 5, 6}
    for row, (y, label) in enumerate(
        ((50, "training: every position"), (120, "decoding: where speculation steps begin"))
    ):
        d.text(20, y - 10, label, ink=GREY)
        for i, word in enumerate(words):
            here = row == 0 or i in visited
            d.token(20 + 80 * i, y, 74, word, BLUE if here else GREY)
    d.text(
        20,
        180,
        "Steps begin where the last one failed, so visited anchors are harder: α there is lower.",
        size=12,
        ink=GREY,
    )
    return d.svg()


def shapes() -> str:
    """A chain and a tree of drafted tokens, verified in one pass each."""
    d = Drawing(760, 210, "A chain of three tokens, and a tree of six")
    d.text(20, 28, "a chain, γ = 3", size=14)
    for i, word in enumerate(["is", "blue", "because", "of"]):
        d.token(20 + 92 * i, 90, 72, word, BLUE if i == 0 else GREEN)
        if i:
            d.arrow(20 + 92 * i - 20, 105, 20 + 92 * i - 2, 105)
    d.text(400, 28, "a tree of 6 nodes, depth 3", size=14)
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

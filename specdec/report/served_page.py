"""The page of a draft that was measured in an engine, compared with the report of its run."""

from pathlib import Path

from specdec.measure.results import FILE, Measured, Results
from specdec.measure.served import Served, ServedAt
from specdec.report import markdown
from specdec.report.markdown import escaped, table
from specdec.report.verdict import as_engines_draft

PAGE = "served.md"


def write_served_page(folder: Path, served: Served, report: Path) -> str:
    """Write served.json, served.md and served.html into a folder; returns the page as text for a
    terminal. `report` is the folder of the report of the draft's run, which need not exist. Raises
    UserError if that report is damaged."""
    served.write(folder)
    promised = Results.load(report) if (report / FILE).exists() else None
    markdown.write(folder / PAGE, served_page_text(escaped(served), escaped(promised)))
    return served_page_text(served, promised)


def served_page_text(served: Served, promised: Results | None) -> str:
    """A page of Markdown with verbatim texts. `promised` are the results of the draft's run."""
    deepest = max(len(at.accepted) for at in served.asked)
    columns = ["τ", *(f"position {k + 1}" for k in range(deepest)), "speculation steps", "tokens/s"]
    columns += ["plain tokens/s", "speedup", "same responses"] if served.plain else []
    rows, told = dict[str, list[str]](), list[str]()
    for at in served.asked:
        rows[f"T = {at.temperature:g}"] = _row(at, deepest, served.prompts)
        if promised is not None and (ours := _chains(promised, at.temperature)) is not None:
            shares = [share.text() for share in ours.reached[:deepest]]
            shares += ["—"] * (deepest - len(shares))
            own = [ours.tau.text(2), *shares, f"{ours.speculation_steps:,}"]
            rows[f"T = {at.temperature:g}, the run's report"] = own
            told.append(_compared(at, ours))
    beside = f", in turn with {served.plain}, which serves without drafts" if served.plain else ""
    over = f"{served.conversations} conversations" if served.conversations else "prompts"
    blocks = [
        f"# {served.draft}, served",
        f"These are the figures of {served.engine}{beside}, not of Draftsmith's decoder. "
        f"{served.prompts} {served.origin} were answered one at a time, with at most "
        f"{served.max_new_tokens} tokens each. Seconds include the prefill and HTTP. The figure "
        "of a position is the share of speculation steps that accepted it and all before it, also "
        "beyond the end of a response; τ counts the tokens of the responses. Brackets "
        f"are 95 % intervals over {over}. An engine does not say which draft it loaded.",
        table("", columns, rows),
    ]
    if promised is not None and told:
        blocks.append(
            "The rows of the run's report are what Draftsmith's decoder counted with chains on "
            f"{promised.prompts} {promised.origin}, with at most "
            f"{promised.max_new_tokens} tokens each. " + " ".join(told)
        )
    return "\n\n".join(blocks) + "\n"


def _row(at: ServedAt, deepest: int, prompts: int) -> list[str]:
    shares = [share.text() for share in at.accepted]
    row = [at.tau.text(2), *shares, *["—"] * (deepest - len(shares))]
    row += [f"{at.speculation_steps:,}", at.tokens_per_second.text(1)]
    if at.plain_tokens_per_second is not None and at.speedup is not None:
        row += [at.plain_tokens_per_second.text(1), at.speedup.text(2)]
        row.append(f"{at.identical} of {prompts}")
    return row


def _chains(results: Results, temperature: float) -> Measured | None:
    """The lossless figures at a temperature with chains as engines draft them; None if there are
    none."""
    chains = as_engines_draft(results)
    lossless = (x for x in chains if x.way.lossless and x.way.temperature == temperature)
    return next(lossless, None)


def _compared(at: ServedAt, ours: Measured) -> str:
    """A sentence on whether the engine's acceptance is that of the report."""
    where = f"At T = {at.temperature:g}"
    if at.accepted and len(at.accepted) != ours.way.gamma:
        return (
            f"{where} the engine drafts {len(at.accepted)} tokens and the report {ours.way.gamma}: "
            "compare the positions, not τ."
        )
    if not (at.tau.claims and ours.tau.claims):
        return f"{where} there are too few prompts to compare the two τ."
    if at.tau.low <= ours.tau.high and ours.tau.low <= at.tau.high:
        return f"{where} the two intervals of τ overlap."
    return (
        f"{where} the two intervals of τ do not overlap: the prompts, the dtype or the draft that "
        "the engine loaded may be others."
    )

"""Finds the hypothesis that explains why a server accepts other tokens than a reference promises.

First the text: if the server's tokens are not those of the target, no draft can be judged by them.
Then the draft: each `ChangedDraft` of hypotheses.py predicts how many tokens are accepted at each
position of each response. Its *misfit* is the sum of the differences from the server's counts. Let
m be the misfit of the draft as exported, and n the number of tokens that the server accepted. The
first rule that applies decides:

1. m is above `FEW` and above `SHARE_FEW` n, and the least misfit is at most m / 2 and at most
   `SHARE` of the larger of m and n: that hypothesis, unless it is one of several that fit as well
   and rule 2 applies. Below, one of so many would fit by chance.
2. The server's tokens are those of the target in bfloat16 and not in float32, and m, or the misfit
   in bfloat16, is at most `SHARE_16` n: the dtype.
3. m is at most `FEW`, or at most `SHARE` n: rounding.
4. Else no hypothesis explains it.

Where the draft as exported is not known, there is no m. Then the differences of the export's files
are named, with the misfit that they leave.

Hypotheses with the same misfit cannot be told apart by these prompts, and all of them are named.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from specdec.measure.hypotheses import HYPOTHESES, ChangedDraft, Experiment
from specdec.measure.reference import ROUNDING
from specdec.targets.target import Target

FEW, SHARE_FEW = 2, 0.01  # tokens, and share of the accepted ones, that rounding always explains
SHARE = 0.05  # of the accepted tokens: the misfit that rounding explains
SHARE_16 = 0.2  # the same where the server computes in bfloat16 and the draft in float32
ROUNDED, NONE = "rounding", "none"
ANOTHER_TARGET = "another target"


@dataclass(frozen=True)
class Explanation:
    """A change of the draft, and its misfit in accepted tokens."""

    culprit: str
    change: str
    misfit: int


@dataclass(frozen=True)
class ServedDiagnosis:
    """`culprits` are what is named: the hypotheses that explain the counts best, `ROUNDED` or
    `NONE`. `why` says so in words. `unchanged` is the misfit of the draft as it was exported (None:
    it is not known), and `accepted` the number of tokens that the server accepted."""

    culprits: list[str]
    why: str
    unchanged: int | None = None
    accepted: int = 0
    explanations: list[Explanation] = field(default_factory=list)  # the best first


def diagnosed(
    here: Experiment, more: Iterable[ChangedDraft] = (), *, known: bool = True
) -> ServedDiagnosis:
    """What explains the responses of an experiment. `more` are further changes, which are tried
    first. If the draft as it was exported is not `known`, they alone are tried, and the best of
    them, of which there is at least one, is named."""
    if (other := _other_target(here)) is not None:
        return other
    changes, tried = list(more), list[Explanation]()
    if known:
        changes += (change for hypothesis in HYPOTHESES.values() for change in hypothesis(here))
    for changed in changes:
        tried.append(Explanation(changed.culprit, changed.change, here.misfit(changed)))
    tried.sort(key=lambda one: one.misfit)  # stable: the order of the table
    accepted = sum(response.accepted_in_all for response in here.responses)
    if not known:
        return _of_changes(tried, accepted)
    unchanged = here.misfit(here.unchanged)
    diagnosis = named(tried, unchanged, accepted)
    unnamed = diagnosis.culprits in ([NONE], [ROUNDED]) or "dtype" in diagnosis.culprits
    in_bfloat16 = [(one.misfit, "bfloat16") for one in tried if one.culprit == "dtype"]
    misfit, dtype = min([(unchanged, "float32"), *in_bfloat16])
    if unnamed and _in_16_bits(here) and misfit <= SHARE_16 * accepted:
        why = (
            "the server's tokens are those of a target in bfloat16; the draft as exported, in "
            f"{dtype}, gives its {accepted} accepted tokens but for {misfit}"
        )
        return replace(diagnosis, culprits=["dtype"], why=why)
    return diagnosis


def named(tried: list[Explanation], unchanged: int, accepted: int) -> ServedDiagnosis:
    """The diagnosis by the rule, from explanations in the order of their misfits."""
    most = SHARE * max(accepted, unchanged, 1)
    best = [one for one in tried if one.misfit == tried[0].misfit] if tried else []
    beside = (unchanged, accepted, tried)
    by_chance = unchanged <= max(FEW, SHARE_FEW * accepted)
    if best and not by_chance and best[0].misfit <= most and 2 * best[0].misfit <= unchanged:
        culprits = list(dict.fromkeys(one.culprit for one in best))
        ways = "; or ".join(one.change for one in best[:4])
        fit = "exactly" if not best[0].misfit else f"but for {best[0].misfit} tokens"
        return ServedDiagnosis(culprits, f"{ways}: this gives the server's counts {fit}", *beside)
    if by_chance or unchanged <= most:
        why = f"the draft as exported gives the server's counts but for {unchanged} tokens"
        return ServedDiagnosis([ROUNDED], why, *beside)
    why = (
        f"none of {len(tried)} changes of the draft gives the server's counts: of {accepted} "
        f"accepted tokens, the draft as exported misses {unchanged} and the nearest change "
        f"{tried[0].misfit if tried else unchanged}; give what the server may have loaded with "
        "--suspect"
    )
    return ServedDiagnosis([NONE], why, *beside)


def _of_changes(tried: list[Explanation], accepted: int) -> ServedDiagnosis:
    """The diagnosis where the draft as it was exported is not known."""
    best = tried[0]
    fit = f"of {accepted} accepted tokens, this leaves {best.misfit} unexplained"
    if not best.misfit:
        fit = "this gives the server's counts exactly"
    return ServedDiagnosis([best.culprit], f"{best.change}: {fit}", None, accepted, tried)


def _other_target(here: Experiment) -> ServedDiagnosis | None:
    """The diagnosis where the server's tokens are not the target's; None where they are, in its own
    dtype or in bfloat16."""
    own = here.gaps(here.target)
    if max(own, default=0.0) <= _tolerance(here.target):
        return None
    wrong = [gap for gap in own if gap > _tolerance(here.target)]
    said = (
        f"{len(wrong)} of the server's {len(own)} tokens are not those of {here.target.name}, "
        f"whose best logit is up to {max(wrong):.2g} higher"
    )
    for name, target in here.suspects.targets.items():
        if max(here.gaps(target), default=0.0) <= _tolerance(target):
            return ServedDiagnosis(
                [ANOTHER_TARGET], f"the server's tokens are those of {name}; {said}"
            )
    rounded = here.target_in(torch.bfloat16)
    gaps = own if rounded is None else here.gaps(rounded)
    if max(gaps, default=0.0) <= ROUNDING["bfloat16"]:
        return None
    return ServedDiagnosis([ANOTHER_TARGET], said)


def _in_16_bits(here: Experiment) -> bool:
    """Whether the server's tokens are off from a float32 target's by what bfloat16 explains."""
    if here.target.dtype != torch.float32:
        return False
    return ROUNDING["float32"] < max(here.gaps(here.target), default=0.0) <= ROUNDING["bfloat16"]


def _tolerance(target: Target) -> float:
    return ROUNDING.get(str(target.dtype).removeprefix("torch."), ROUNDING["bfloat16"])

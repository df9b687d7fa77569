"""Verification rules by their names, as the configuration and the command line give them."""

import inspect

import torch

from specdec.decoding.verify import RULES, Rule, law
from specdec.errors import UserError, nearest


def named(text: str) -> Rule:
    """A rule of `RULES` by its name, with other parameters after a colon: "lenience:factor=0.8",
    "typical:epsilon=0.2,delta=0.05". Raises UserError for a name or a parameter that is not
    there, and for a value that the rule does not take."""
    name, _, given = text.partition(":")
    if name not in RULES:
        raise UserError(f"decode.rule={name!r} is unknown{nearest(name, RULES)}")
    rule, values = RULES[name], {}
    known = _parameters(rule)
    for part in filter(None, given.split(",")):
        key, _, value = part.partition("=")
        try:
            values[key] = float(value)
        except ValueError:
            raise UserError(f"decode.rule={text!r}: {part!r} is not like factor=0.8") from None
        if key not in known:
            has = f"; known: {', '.join(known)}" if known else ", which has no parameters"
            raise UserError(f"decode.rule={text!r}: {key!r} is no parameter of {name}{has}")
    if not values:
        return rule
    rule, one = rule.tuned(**values), torch.ones(1, 2, 1)
    try:  # on a vocabulary of a single token: does the rule take these values?
        law(rule, torch.zeros(1, 1, dtype=torch.long), None, one[:, :1], one)
    except ValueError as error:
        raise UserError(f"decode.rule={text!r}: {error}") from None
    return rule


def rule_name(rule: Rule) -> str:
    """The name of a rule of `RULES`, with its parameters where they are others."""
    judge = rule.node or rule.whole
    parameters = getattr(judge, "keywords", {})
    for name, known in RULES.items():
        if getattr(judge, "func", judge) is (known.node or known.whole):
            given = ",".join(f"{key}={value:g}" for key, value in parameters.items())
            return f"{name}:{given}" if given else name
    return "of the caller's"


def _parameters(rule: Rule) -> list[str]:
    """What `Rule.tuned` may set: the numbers that the rule's function takes."""
    judge = rule.node or rule.whole
    found = inspect.signature(judge).parameters.values() if judge else ()
    return [p.name for p in found if type(p.default) is float]

"""The decoding options of scripts/evaluate and scripts/generate: fields of `DecodeConfig`."""

import argparse
import json
from typing import Any

from omegaconf import OmegaConf

from specdec.errors import typed
from specdec.length import LENGTHS
from specdec.strategy import TREES, DecodeConfig
from specdec.verify import RULES

NAMES = (
    *("gamma", "max_new_tokens", "top_p", "top_k", "rule", "tree", "nodes", "branches", "paths"),
    *("length", "compile", "greedy_draft", "seed"),
)


def add(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Add the options that both commands have, with `max_new_tokens` as its default."""
    add = parser.add_argument
    add("--dtype", default="bfloat16", help="of target and draft")
    add("--max-new-tokens", type=int, default=max_new_tokens)
    add("--gamma", type=int, help="default: the depth that was trained")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--rule", default="auto", help=f"at T > 0: auto, {', '.join(RULES)}")
    add("--tree", choices=TREES, help="default: a chain")
    add("--nodes", type=int, default=12, help="of a tree")
    add("--branches", type=int, default=4, help="children a node, dynamic trees")
    add("--paths", type=json.loads, help="of a static tree: [[0], [1], [0, 0]]")
    add("--length", default="fixed", help=f"of a chain: {', '.join(LENGTHS)}")
    add("--settings", nargs="*", default=[], help="of the length: threshold=0.4")
    add("--greedy-draft", action="store_true", help="draft greedily at T > 0")
    add("--compile", action="store_true", help="through torch.compile")
    add("--seed", type=int, default=0)


def config(args: argparse.Namespace, **more: Any) -> DecodeConfig:
    """What was given, checked; `more` are fields that one of the commands alone has.

    Raises UserError for a value that does not fit.
    """
    given = {name: getattr(args, name) for name in NAMES} | more
    given["settings"] = OmegaConf.to_container(OmegaConf.from_dotlist(args.settings))
    return typed(DecodeConfig, given, "decode")

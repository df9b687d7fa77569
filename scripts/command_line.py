"""Arguments that scripts share: a draft, the target it was trained for, and decoding.

Most options of decoding set the field of `DecodeConfig` with the same name.
"""

import argparse
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specdec.decoding.config import TREES, DecodeConfig, beyond_training, require_fitting
from specdec.decoding.draft_length import LENGTHS
from specdec.decoding.verification_methods import VERIFICATION_METHODS
from specdec.drafters import Drafter
from specdec.errors import UserError, require
from specdec.files import record
from specdec.formats import draft_checkpoint
from specdec.measure.choosing import NODES
from specdec.progress import console
from specdec.targets.loading import load_target, opening
from specdec.targets.parts import TargetParts
from specdec.targets.spread import AUTO
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from train.data.conversations import Conversation, DataConfig, Tally
from train.data.records import LATER_PROMPTS
from train.data.rendering import prompt_rendering
from train.data.run_data import chosen_prompts, measured_prompts
from train.data.sequences import Prompt
from train.data.sources import read_prompts_file
from train.data.suites import SUITES, find_suite
from train.data.user_turns import Respond, prompts_of_all_turns, spread_over_categories
from train.folder import noted_prompts, shape_of_run

SHAPE = ("gamma", "tree", "nodes", "branches", "paths", "draft_length", "draft_length_settings")
RENAMED_OPTIONS = {  # the name that an option has now
    "--length": "--draft-length",
    "--log-rounds": "--log-steps",
    "--rule": "--verification",
    "--settings": "--draft-length-settings",
}
DRAFT = "a run's draft folder, such as runs/NAME/best, or somebody else's draft"


class Parser(argparse.ArgumentParser):
    """A parser that shows a script's docstring as its help, takes options before, between and after
    positional arguments, and raises UserError for a mistake."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | options)
        self.intermixing = False

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, and replace ~ by the user's home folder in paths: a shell does not in
        --out=~/here."""
        parsed = super().parse_args(args, namespace)
        for name, value in vars(parsed).items():
            if isinstance(value, Path):
                setattr(parsed, name, Path(os.path.expanduser(value)))
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Supports optional positional arguments after an option: argparse's own method consumes
        them as soon as it can, so that those after an option would be unknown. argparse calls this
        for a subcommand, too."""
        if self.intermixing or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self.intermixing = True  # the method for intermixed arguments calls this one
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.intermixing = False

    def error(self, message: str) -> NoReturn:
        for word in message.partition("unrecognized arguments: ")[2].split():
            old = word.partition("=")[0]
            if (new := RENAMED_OPTIONS.get(old)) in self._option_string_actions:
                raise UserError(f"{old} is now {new}: give {new}")
        raise UserError(f"{message} (--help lists the options)")


def parser_of(doc: str | None) -> Parser:
    """A parser that takes a draft's folder."""
    parser = Parser(description=doc)
    parser.add_argument("draft", type=Path, help=DRAFT)
    return parser


def add_placing(parser: argparse.ArgumentParser) -> None:
    """Add the options for the placement of the target's layers."""
    option = parser.add_argument
    words = "auto: spread the target's layers over GPUs, the CPU's memory and the disk"
    option("--device-map", choices=[AUTO], help=words)
    words = "what each may hold, such as 0=70GB cpu=100GB; default: nine tenths of what is free"
    option("--max-memory", nargs="+", metavar="PLACE=SIZE", help=words)


def placing(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `TargetConfig` set by the options of `add_placing`. Raises UserError for a size
    without a place."""
    sizes = dict[str, str]()
    for text in args.max_memory or ():
        place, equals, size = text.partition("=")
        require(bool(place and equals and size), f"--max-memory {text}: give PLACE=SIZE")
        sizes[place] = size
    return {"device_map": args.device_map, "max_memory": sizes}


def target_of(
    draft: Path, dtype: str, path: str | None = None, packed: bool = True, **placed: Any
) -> Target:
    """The target that a draft was trained for, or the one at `path`, with further fields of
    `TargetConfig`. Prints what was loaded."""
    theirs = draft_checkpoint.read_card(draft).target
    revision = theirs.revision if path is None else None
    name = path or theirs.name
    require(bool(name), f"{draft} does not say which target it is for: give --target")
    wanted = TargetConfig(name, dtype, revision=revision, packed=packed, **placed)
    target = load_target(wanted)
    target.render_prompts_with(theirs.rendering)
    console.print(opening(target, wanted))
    return target


def add_other_target(parser: argparse.ArgumentParser) -> None:
    """Add the option for a draft whose target is not its own."""
    words = "--target may have other weights than the draft's own target, such as a fine-tuned or "
    parser.add_argument("--other-target", action="store_true", help=f"{words}quantised form")


def require_other_target(args: argparse.Namespace) -> bool:
    """Whether --other-target is given. Raises UserError if it is given without --target."""
    given: bool = args.other_target
    require(
        not given or args.target is not None,
        "--other-target is about --target: give the fine-tuned or quantised target there",
    )
    return given


def add_setting(
    parser: argparse.ArgumentParser, name: str, words: str, option: str | None = None
) -> None:
    """Add an option for a field of `DecodeConfig`, with its type and default: --NAME, or another
    `option`."""
    default: Any = getattr(DecodeConfig(), name)
    how: dict[str, Any] = {"action": "store_true"}
    if not isinstance(default, bool):
        kind = default[0] if isinstance(default, list) else default
        how = {"type": type(kind), "default": default, "nargs": "+" if kind != default else None}
        words += "; default: %(default)s"
    parser.add_argument(option or f"--{name.replace('_', '-')}", help=words, **how)


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add the options for the prompts to measure and the repetitions."""
    add_setting(parser, "prompts", "how many prompts to measure acceptance on", "--limit")
    add_setting(parser, "timed", "how many of them to time, for the speedup")
    add_setting(parser, "temperatures", "measured one after another")
    add_setting(parser, "batch", "prompts timed together")
    add_setting(parser, "repeats", "how often each timed prompt is answered")
    add_setting(parser, "fastest", "also measure the static tree or chain expected to be fastest")


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """Add the options of decoding."""
    option = parser.add_argument
    words = "of both models: auto, bfloat16, float32 or float16"
    option("--dtype", default=TargetConfig.dtype, help=words)
    add_placing(parser)
    add_setting(parser, "max_new_tokens", "tokens of a response, at most")
    option("--gamma", type=int, help="tokens drafted in a row; default: as in the draft's run")
    add_setting(parser, "top_p", "keep the likeliest tokens up to this share")
    add_setting(parser, "top_k", "keep this many of the likeliest tokens; 0: all")
    rules = f"auto, {', '.join(VERIFICATION_METHODS)}"
    add_setting(
        parser, "verification", f"verification method at T > 0 (lenience: at any T): {rules}"
    )
    option("--tree", choices=TREES, help="kind of the trees to draft; default: as in the run")
    option(
        "--nodes",
        type=int,
        help=f"size of a tree; default: {NODES} or, if static, the fastest size",
    )
    most = f"most children of a node in a dynamic tree; default: {DecodeConfig.branches}"
    option("--branches", type=int, help=most)
    option("--paths", type=paths_of, help="nodes of a static tree, such as [[0], [1], [0, 0]]")
    option("--draft-length", help=f"policy that shortens chains: {', '.join(LENGTHS)}")
    option("--draft-length-settings", nargs="*", help="of that policy, such as threshold=0.4")
    add_setting(parser, "greedy_draft", "draft greedily at T > 0")
    add_setting(parser, "compile", "use torch.compile")
    option("--log-steps", type=Path, help="append the steps to this file, for data.decoding_log=")
    add_setting(parser, "seed", "of everything that is drawn")
    option("--with", dest="copying", help="make a hybrid with this family that copies text")


def add_thinking(parser: argparse.ArgumentParser) -> None:
    """Add --thinking, an argument for chat templates."""
    words = "ask for reasoning, or for none; default: as in the draft's run (data.thinking)"
    parser.add_argument("--thinking", choices=("on", "off"), help=words)


def render_with_thinking(target: TargetParts, thinking: str | None) -> None:
    """Record that --thinking replaces the setting of the draft's run."""
    if thinking is not None:
        theirs = target.rendering
        asked = DataConfig(template_args=theirs.arguments).with_thinking(thinking)
        rendering = prompt_rendering(asked, target.tokenizer, theirs.chat_template)
        target.render_prompts_with(rendering)


def add_beams(parser: argparse.ArgumentParser) -> None:
    """Add --beams, which `require_beams_alone` checks."""
    parser.add_argument("--beams", type=int, default=1, help="width of a beam search; 1: none")


def require_beams_alone(
    parser: argparse.ArgumentParser, args: argparse.Namespace, read: Collection[str]
) -> None:
    """Raise UserError for fewer than one beam, and for options beside those `read` by a beam search
    of several."""
    require(args.beams >= 1, f"--beams {args.beams}: give 1 or more")
    if args.beams > 1:
        require_no_others(parser, args, read, "--beams")


def require_no_others(
    parser: argparse.ArgumentParser, args: argparse.Namespace, read: Collection[str], mode: str
) -> None:
    """Raise UserError for given options that are not `read` in this mode."""
    for name, value in vars(args).items():
        ignored = name not in read and value != parser.get_default(name)
        option = "--with" if name == "copying" else f"--{name.replace('_', '-')}"
        require(not ignored, f"{option} cannot be combined with {mode}: leave one of them out")


def paths_of(text: str) -> Any:
    """The value of --paths, which is written as JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--paths {text}: give JSON, such as [[0], [1], [0, 0]]") from error


def decoding(args: argparse.Namespace, **more: Any) -> tuple[DecodeConfig, str]:
    """The settings given by the options, checked, and the source of the draft topology: the
    options, the draft's run, or the draft alone. `more` has fields without an option of the same
    name. Raises UserError for a value that does not fit."""
    named = {field.name for field in fields(DecodeConfig)}
    given = {name: x for name, x in vars(args).items() if name in named and x is not None} | more
    origin = "as the options say"
    if "draft_length_settings" in given:
        try:
            given["draft_length_settings"] = OmegaConf.to_container(
                OmegaConf.from_dotlist(args.draft_length_settings)
            )
        except (OmegaConfBaseException, YAMLError) as error:
            words = " ".join(args.draft_length_settings)
            raise UserError(f"--draft-length-settings {words}: give each as NAME=VALUE") from error
    if not given.keys() & {*SHAPE}:
        run, family = args.draft.parent, draft_checkpoint.read_card(args.draft).family
        theirs = shape_of_run(run, SHAPE, family, args.draft)
        said = f"as {run / 'config.json'} says"
        origin = "the depth of the draft itself" if theirs is None else said
        chained = ("gamma",) if given.get("fastest") else SHAPE
        given |= {name: x for name, x in (theirs or {}).items() if name in chained}
    cfg = record(DecodeConfig, given, "decode")
    require(
        not (args.log_steps and cfg.tree),
        f"--log-steps logs chains only, but trees are drafted, {origin}: give --gamma alone",
    )
    return cfg, origin


@dataclass(frozen=True)
class GivenPrompts:
    """The conversations of a file or a suite, and whether all their turns are asked."""

    name: str  # for a folder
    source: str
    conversations: list[Conversation]
    all_turns: bool


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add the options that `given_prompts` reads."""
    words = "lines of text, or JSON with prompt, messages or turns"
    parser.add_argument("--prompts", type=Path, help=words)
    words = "prompts of a benchmark, from an installed package"
    parser.add_argument("--suite", choices=[*SUITES], help=words)
    words = "all: each turn of the user, after the target's own responses to those before; last: "
    words += "the last one, after the responses given; default: all if none are given"
    parser.add_argument("--turns", choices=("all", "last"), help=words)


def given_prompts(args: argparse.Namespace, can_respond: bool = True) -> GivenPrompts | None:
    """The prompts of --prompts or --suite, with all categories in turn; None without them. Prints
    what is ignored in them. Unless the target `can_respond`, only one turn is asked. Raises
    UserError for options that do not fit, and as `read_prompts_file` and `find_suite` do."""
    if not (args.prompts or args.suite):
        require(
            args.turns is None,
            f"--turns {args.turns} is for conversations of your own: give them with --prompts",
        )
        return None
    require(not (args.prompts and args.suite), "--prompts and --suite: give one of them")
    path = find_suite(args.suite) if args.suite else args.prompts
    tally = Tally()
    conversations = spread_over_categories(read_prompts_file(path, tally))
    several = any(conversation.later for conversation in conversations)
    all_turns = can_respond and (args.turns == "all" or (args.turns is None and several))
    if all_turns:
        del tally.changed[LATER_PROMPTS]
    source = args.suite or str(path)
    if tally.changed or tally.ignored:
        console.print(f"prompts from {source}\n{tally}")
    return GivenPrompts(args.suite or path.stem, source, conversations, all_turns)


def ask_all_turns(
    conversations: Sequence[Conversation], respond: Respond, *how: Any
) -> tuple[list[Prompt], str]:
    """The prompts of all turns (see `prompts_of_all_turns`, which also gets `how`), and a
    description of them. Prints the number of skipped turns."""
    asked, skipped = prompts_of_all_turns(conversations, respond, *how)
    for reason, count in skipped.items():
        console.print(f"{count:,} later turns are skipped: {reason}")
    count = len(conversations)
    return asked, f"turns of {count:,} conversation{'s' * (count != 1)}"


def prompts_of_run(
    args: argparse.Namespace, data: DataConfig, target: TargetParts, others: int
) -> tuple[list[Prompt], list[Prompt]]:
    """At most `args.limit` held-out prompts of the run that made the draft `args.draft`, whose data
    settings are `data`, and at most `others` more, for calibration and for choices."""
    noted = None
    if not (args.thinking or args.target):
        noted = noted_prompts(args.draft.parent, args.limit)
    if noted is not None:
        return chosen_prompts(*noted, args.limit, others)
    how = args.limit, others, args.thinking, args.draft
    return measured_prompts(data, target.tokenizer, *how)


def tell_shape(cfg: DecodeConfig, origin: str, drafter: Drafter, target: TargetParts) -> None:
    """Print the draft topology and its source (see `decoding`), and whether the draft was trained
    for it. Raises UserError as `require_fitting` does."""
    require_fitting(cfg, drafter, target)
    console.print(f"drafts {cfg.shape_in_words(drafter.depth)}, {origin}")
    if warning := beyond_training(cfg, drafter):
        console.print(warning)

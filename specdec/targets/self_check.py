"""Self-checks of a target when it is loaded: a model that this project would run wrongly is
rejected.

Heads, masks and caches of models differ more than their classes show. If the results differed from
the model's own, α would be measured against another p than the one that is served. The targets here
are those of target.py, which imports this file, or of another kind.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specdec.compat import attention_of, copy_of_layers, set_attention
from specdec.context import HiddenStateSpec
from specdec.errors import UserError, first_line, require
from specdec.runtime.cpu.grouped_attention import use_sdpa
from specdec.runtime.quantised import dense_linear, holds_weight, is_linear
from specdec.runtime.recurrent_states import bounds_steps, in_steps
from specdec.runtime.replay import ReplayCache
from specdec.targets.parts import TargetParts, config_of_layers
from specdec.targets.shrunken_twin import SHARP, NoTwin, TwinChecks, distance

SAME = 1e-2  # the largest distance of logits that differ only by the order of operations
ROUGH = 0.2  # the same in 16 bits, through all layers
ROOM = 4  # logits may be off by so many times what rounding the input once changes
FEW = 64  # rows of an embedding that the check reads
LARGE = 10**9  # weights of a layer; of larger layers, only one of each kind is checked


@contextmanager
def understood(target: TargetParts) -> Iterator[None]:
    """Turn any error raised by an unknown model into a UserError."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _unread(target, error) from error


def _unread(target: TargetParts, error: Exception) -> UserError:
    return UserError(
        f"{target.title} cannot be read ({first_line(error)}): give another causal LM, or a T5 or "
        "BART"
    )


def check_causal(target: Any) -> None:
    """Choose how a causal target continues from a cache: the first of its `readings` that gives the
    right logits for ragged rows and, if it reads trees, for a tree whose paths are kept. The
    target's shrunken twin, whose length thresholds are a few tokens, must give transformers' logits
    in the same way. Raises UserError if no reading is right. In 16 bits and with quantised weights,
    rounding hides errors, so a few layers are checked in float32 as well."""
    with understood(target), torch.no_grad():
        target.settle_head()
    twin = twin_check_of(target)
    ways = [(reading, False) for reading in target.readings]
    if len(ways) > 1 and target.takes_positions and not target.holders:
        ways.insert(1, (ways[0][0], True))
    if twin is not None and not twin.texts_right():
        ways = ways[-1:]  # whose error is told
    for n, (target.reading, target.counted) in enumerate(ways, 1):
        try:
            with torch.no_grad():
                if _reads_on(target, twin):
                    return
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model may refuse our masks or our cache in any way
            if n == len(ways):  # but not to read a whole text
                raise _unread(target, error) from error
    with torch.no_grad():
        if twin is not None and _cache_right(target):
            raise error_unlike_transformers(target)
    raise UserError(
        f"{target.title} gives other logits for a text when more tokens follow it, so it is not "
        "causal or depends on the length of a text, and what it decodes would not follow the p "
        "that a draft is trained on: give another target (a kind of BERT is causal only with "
        "is_decoder=true in its config.json)"
    )


def twin_check_of(target: Any) -> TwinChecks | None:
    """The check of the target's shrunken twin; None if there is no twin: then only transformers'
    modules and attention are used. Transformers' attention is also used if our own skips a part of
    a layer's computation."""
    try:
        twin = TwinChecks(target)
        if not twin.texts_right() and attention_of(target.model.config) == "grouped":
            use_sdpa(target.model)
            twin = TwinChecks(target)
            twin.texts_right()
        return twin
    except NoTwin as error:
        target.without_twin = str(error)
        use_sdpa(target.model)
        return None


def error_unlike_transformers(target: TargetParts) -> UserError:
    """The error for a target whose logits differ from those of transformers."""
    return UserError(
        f"{target.title} gives other logits here than in transformers once a text is longer than "
        "one of the lengths in its config.json, such as a window or a block (found with a small "
        "model of the same classes): give another target"
    )


def _reads_on(target: Any, twin: TwinChecks | None) -> bool:
    """Whether the logits over a cache are right."""
    if twin is not None and twin.lean_right() and _lean_right(target):
        return True
    target.lean_allowed = False
    if twin is not None and not twin.texts_right():
        return False
    right = (twin is None or twin.cache_right()) and _cache_right(target)
    if not right and target.holders:
        for module in target.holders:
            in_steps(module)
        right = (twin is None or twin.cache_right(steps=True)) and _cache_right(target)
    return right


@torch.no_grad()
def check_head(target: TargetParts) -> None:
    """Raise UserError unless `logits(final)`, and `unembedding` over part of the vocabulary, equal
    the model's own output. If the usual head gives wrong logits, this looks for factors of the head
    and for other modules before it."""
    changes = (target.find_transform, target.flatten_head, target.leave_scale)
    right = _head_right(target)
    for change in changes if not right else ():
        change()
        if right := _head_right(target):
            break
    require(
        right,
        f"{target.title} turns hidden states into logits in a way that is not supported: give "
        "another target (or add its scaling to head_scaling in specdec/targets/output_head.py)",
    )


def _head_right(target: TargetParts) -> bool:
    ids = torch.arange(1, 5, device=target.device)[None] % target.vocab_size
    some_S = torch.arange(0, target.vocab_size, -(-target.vocab_size // 64), device=target.device)
    state = target.body(input_ids=ids, use_cache=False).last_hidden_state
    final = target.before_head(state).to(target.dtype)
    theirs = target.model(input_ids=ids, use_cache=False).logits
    return (
        distance(target.logits(final), theirs) <= SAME
        and distance(target.unembedding(some_S)(final), theirs[..., some_S]) <= SAME
    )


def _cache_right(target: Any) -> bool:
    """Whether the modules' logits over a cache differ from those without one by no more than
    rounding explains."""
    error = _cache_error(target)
    right = error <= _limit(target) or error <= ROOM * _rounding_error(target)
    if right and not _exact(target) and (few := few_layers(target)) is not None:
        right = _cache_error(few) <= SHARP
    return right


def _lean_right(target: Any) -> bool:
    """Whether the fused fast path, if there is one, gives the right logits over a cache; in doubt,
    it is not used."""
    try:
        if target.lean is None:
            return False
        right = _cache_error(target) <= _limit(target)
        few = few_layers(target) if right and not _exact(target) else None
    except torch.OutOfMemoryError:
        raise
    except Exception:  # parts with the usual names may take other arguments
        return False
    return right and (_exact(target) or (few is not None and _cache_error(few) <= SHARP))


def _exact(target: Any) -> bool:
    return target.dtype in (torch.float32, torch.float64) and not target.quantisation


def _limit(target: Any) -> float:
    return SHARP if _exact(target) else ROUGH


def _cache_error(target: Any) -> float:
    """The distance between logits over a cache and those of passes over complete texts. The logits
    are those of a small tree (its second node follows the first) after rows of unequal length, and
    of the next tokens after a path of each row was kept and the rows have changed places. A target
    without trees reads a chain."""
    lengths, paths, parents = [9, 5], [[0, 1], [2]], [-1, 0, -1]
    if not target.reads_trees:
        paths, parents = [[0, 1], [0]], [-1, 0, 1]
    ids = (7 * torch.arange(2 * 14, device=target.device).view(2, 14) + 3) % target.vocab_size
    texts = [torch.cat([ids[b, : lengths[b]], ids[b, 9:12][paths[b]], ids[b, 12:]]) for b in (0, 1)]
    cache, worst = target.new_cache(), 0.0
    steps = any(map(bounds_steps, target.holders))  # then transformers' own steps are right

    def logits(few: Tensor, parents_BT: Tensor | None = None) -> Tensor:
        _, final = target.hidden_states(few, HiddenStateSpec(), cache=cache, parents_BT=parents_BT)
        logits_BTV: Tensor = target.logits(final)
        return logits_BTV

    def error(logits_TV: Tensor, b: int, text: Tensor) -> float:
        """The distance between logits [T, V] and those of the last T tokens of row b's text."""
        if steps:
            theirs = _by_steps(target, text[None], lengths[b])[0]
        else:
            theirs = target.own_logits(text[None])[0]
        return distance(logits_TV, theirs[-len(logits_TV) :])

    logits(ids[:, :9])
    cache.commit(lengths)
    tree = logits(ids[:, 9:12], torch.tensor(2 * [parents], device=target.device))
    for b, n in enumerate(lengths):
        for path in paths:
            text = torch.cat([ids[b, :n], ids[b, 9:12][path]])
            worst = max(worst, error(tree[b, path], b, text))
    kept = [path + [-1] * (2 - len(path)) for path in paths]
    cache.commit([2, 1], torch.tensor(kept, device=target.device))
    cache.select([1, 0])
    after = logits(ids[[1, 0], 12:])
    worst = max(worst, error(after[0], 1, texts[1]), error(after[1], 0, texts[0]))
    if isinstance(cache, ReplayCache):  # rows of one length are put together
        cache.commit([2, 2])
        cache.select([0, 0])
        for begin, end in (0, 2), (2, 3):  # a model may read single tokens in another way
            for ours_TV, some in zip(logits(ids[:, begin:end]), ids[:, :end], strict=True):
                worst = max(worst, error(ours_TV, 1, torch.cat([texts[1], some])))
            cache.commit([end - begin] * 2)
    return worst if target.reads_trees or steps else max(worst, _step_error(target))


def _step_error(target: Any) -> float:
    """The distance between logits with states updated one token at a time and those of a pass over
    the complete text. A layer may compute a one-token step differently."""
    text = (11 * torch.arange(28, device=target.device)[None] + 5) % target.vocab_size
    return distance(_by_steps(target, text, 4), target.own_logits(text))


def _by_steps(target: Any, ids_1T: Tensor, first: int) -> Tensor:
    """The logits [1, T, V] of a text that is read one token at a time after the `first` few."""
    cache, read = target.new_cache(), list[Tensor]()
    for part in (ids_1T[:, :first], *ids_1T[:, first:].split(1, 1)):
        read.append(target.hidden_states(part, HiddenStateSpec(), cache=cache)[1])
        cache.commit([part.shape[1]])
    logits_1TV: Tensor = target.logits(torch.cat(read, 1))
    return logits_1TV


def _rounding_error(target: Any) -> float:
    """The change in logits if a text's embeddings are rounded once more: some weights amplify small
    differences. 0 if the change does not reach the logits."""
    ids = (5 * torch.arange(12, device=target.device)[None] + 3) % target.vocab_size
    before = target.model(input_ids=ids, use_cache=False).logits

    def disturbed(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
        sign = 1 - 2 * (torch.arange(out.shape[-1], device=out.device) % 2).to(out.dtype)
        return out * (1 + torch.finfo(out.dtype).eps * sign)

    with target.embedding.register_forward_hook(disturbed):
        return distance(target.model(input_ids=ids, use_cache=False).logits, before)


def few_layers(target: Any) -> Any:
    """A copy of a causal target in float32 on the CPU, with a layer of each kind and the first rows
    of its embeddings and head. Its matrices are rescaled to the size of new ones: with large
    weights, attention sees only one token, and errors in positions and masks would not show. None
    for a model that cannot be copied this way."""
    if target.processes > 1:  # tensor_parallel.py has checked a plain copy of some layers before
        return None
    layers, kept = target.layers, _of_each_kind(target)
    head = target.model.get_output_embeddings()

    def copied(part: nn.Module, x: Tensor) -> Tensor:
        rows = FEW if isinstance(part, nn.Embedding) or part is head else None
        cut = (x.detach()[:rows] if x.dim() else x.detach()).to("cpu", copy=True)
        if cut.is_floating_point():
            cut = cut.float()
        if not isinstance(x, nn.Parameter):
            return cut
        if cut.dim() > 1 and cut.is_floating_point() and (size := float(cut.norm())) > 0:
            cut *= math.sqrt(cut.numel() / cut.shape[-1]) / size
        return nn.Parameter(cut, requires_grad=False)

    def plain(part: Any) -> nn.Module | None:
        """A plain layer for a quantised one, or for one whose method a library replaced."""
        if not is_linear(part) or (holds_weight(part) and "forward" not in vars(part)):
            return None
        return dense_linear(part, target.dtype)

    try:
        few = copy.copy(target)
        few.model, few.layers = copy_of_layers(target.model, layers, kept, copied, plain)
        few.config = copy.deepcopy(target.config)
        of_text = few.model.config.get_text_config(decoder=True)
        others = [k for k in range(len(layers)) if k not in kept]
        for key, value in config_of_layers(of_text.to_dict(), kept + others).items():
            setattr(of_text, key, value)
        if attention_of(few.config) not in ("eager", "sdpa", "grouped"):
            few.model.set_attn_implementation("eager")  # other kinds of attention need a GPU
            set_attention(few.config, "eager")
        few.embedding = few.model.get_input_embeddings()
        few.head = few.model.get_output_embeddings()
        if target.head is not head:
            few.flatten_head()
        if target.transform is not None:
            few.find_transform()
        few.body(input_ids=torch.arange(4)[None], use_cache=False)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # a library's own layers and tensors may refuse to be copied in any way
        return None
    return few


def _of_each_kind(target: Any) -> list[int]:
    """The index of the first layer of each kind of attention, or of the first two if all are
    alike."""
    by_layer = [
        kind_of_layer
        for name in ("layer_types", "no_rope_layers")
        if len(kind_of_layer := getattr(target.config, name, None) or ()) == len(target.layers)
    ]
    kinds = [tuple(map(str, kind)) for kind in zip(map(type, target.layers), *by_layer)]
    kept = sorted(kinds.index(kind) for kind in set(kinds))
    small = sum(x.numel() for x in target.layers[0].parameters()) < LARGE
    return kept if len(kept) > 1 or not small else list(range(min(2, len(kinds))))

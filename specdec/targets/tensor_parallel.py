"""Tensor parallelism: the processes of a launch hold one target together, by transformers' plan.
Each process holds its part of every layer, and all of the parts around them.

All processes compute every pass together, but only the first one decides which passes there are:
while it leads, it sends its inputs and the changes to its caches to the others, and they do the
same with their parts of the layers. So all code for an undivided target works with a divided one,
and processes cannot come to different decisions.
"""

import copy
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.compat import change_class
from specdec.context import HiddenStateSpec
from specdec.errors import ReportedByAnotherProcess, UserError, first_line, require
from specdec.runtime.cache import SlotCache
from specdec.runtime.quantised import method
from specdec.targets.checkpoint_files import SafetensorsFiles
from specdec.targets.parts import TargetParts, config_of_layers, depth_of
from specdec.targets.self_check import ROUGH
from specdec.targets.shrunken_twin import SHARP, distance
from specdec.targets.target import PassStates, Target
from specdec.targets.target_config import TargetConfig, target_name
from specdec.targets.transformers_model import empty_model, load_model, without_warnings

MOST = 8  # layers of a plain copy at most, to which the divided ones are compared
# the styles of transformers' plans that divide weights
DIVIDING = {"colwise", "rowwise", "packed_colwise", "packed_rowwise", "colwise_gather_output"}
DIVIDING |= {"colwise_rep", "rowwise_rep", "rowwise_split_input"}
END, LOAD, FREE, CACHE, KEEP, SELECT, REPLACE, DROP, READ, CONTINUE = range(10)  # commands


class TensorParallelTeam:
    """The processes that hold a target together, as this one sees them. While the first one leads,
    the others `help`. It lasts as long as the job; the target may be loaded and freed several
    times: `whole` loads this process's part of it, and `release` frees it."""

    def __init__(self, whole: Callable[[], Any], release: Callable[[], None]) -> None:
        self._whole, self._release = whole, release
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.leads = False
        self.broken = False  # whether a pass failed in the middle, so that no more can follow
        self._count = 0  # number of caches so far
        self._gone = list[int]()  # caches of the leader that the others may drop
        self._caches: dict[int, SlotCache] = {}  # the others' own

    @contextmanager
    def lead(self) -> Iterator[None]:
        """Make the other processes help with the first one's work inside the block."""
        self.leads, failure = True, None
        try:
            yield
        except BaseException as error:
            failure = first_line(error)
            raise
        finally:
            if not self.broken:
                self.tell(END, failure)
            self.leads = False

    def tell(self, *command: Any) -> None:
        """Send a command to the others, if this process leads."""
        if not self.leads:
            return
        gone, self._gone = self._gone, []
        dist.broadcast_object_list([(gone, _moved(command, torch.device("cpu")))])

    @contextmanager
    def together(self, *command: Any) -> Iterator[None]:
        """Make the others compute the same command as the block. After an error, the processes are
        out of step and cannot compute together any more: raises UserError."""
        self.tell(*command)
        try:
            yield
        except Exception as error:
            self.broken = self.leads
            if not self.leads or isinstance(error, UserError):
                raise
            if _is_lost(error):
                raise ReportedByAnotherProcess("another process of the launch has ended") from error
            raise UserError(
                f"a pass of the target, which {self.size} processes hold together, failed "
                f"({first_line(error)}): if memory ran out, lower responses.batch, data.max_length "
                "or decode.counting; the same command continues from what is written"
            ) from error

    def help(self) -> str | None:
        """Execute the first process's commands until it ends. Returns the error that ended it, or
        None."""
        try:
            return self._help()
        except RuntimeError as error:
            if _is_lost(error):
                raise ReportedByAnotherProcess(
                    "the first process of the launch has ended"
                ) from error
            raise

    def _help(self) -> str | None:
        while True:
            held: list[Any] = [None]
            dist.broadcast_object_list(held)
            gone, (what, *arguments) = held[0]
            for number in gone:
                self._caches.pop(number, None)
            if what == END:
                self._caches.clear()
                failure: str | None = arguments[0]
                return failure
            if what == LOAD:
                self._whole()
            elif what == FREE:
                self._release()
            else:
                self._follow(what, arguments)

    @torch.inference_mode()
    def _follow(self, what: int, arguments: Sequence[Any]) -> None:
        target: TensorParallelTarget = self._whole()
        if what == READ:
            target.follow(*_moved(arguments, target.device))
            return
        number, *others = arguments
        if what == CACHE:
            self._caches[number] = target.new_cache()
            return
        cache = self._caches[number]
        if what == CONTINUE:
            target.follow_on(cache, *_moved(others, target.device))
        elif what == KEEP:
            cache.commit(*_moved(others, target.device))
        elif what == SELECT:
            cache.select(*others)
        elif what == REPLACE:
            rows, other = others
            cache.replace(rows, self._caches[other])
        else:
            cache.drop()

    def watch(self, cache: SlotCache) -> SlotCache:
        """The leader's cache, mirrored by the others from now on."""
        if self.leads:
            change_class(cache, _mirrored(type(cache)))
            assert isinstance(cache, _Mirrored)
            cache.team, cache.number, cache.within = self, self._count, False
            self._count += 1
            finalize(cache, self._gone.append, cache.number)
            self.tell(CACHE, cache.number)
        return cache


class _Mirrored(SlotCache):
    """A cache whose changes the other processes repeat."""

    team: TensorParallelTeam
    number: int
    within: bool  # whether a change is part of another one

    @contextmanager
    def _told(self, what: int, *arguments: Any) -> Iterator[None]:
        if self.within:
            yield
            return
        self.within = True
        try:
            with self.team.together(what, self.number, *arguments):
                yield
        finally:
            self.within = False

    def commit(self, counts: Sequence[int], path_BK: Tensor | None = None) -> None:
        with self._told(KEEP, list(counts), path_BK):
            super().commit(counts, path_BK)

    def drop(self) -> None:
        with self._told(DROP):
            super().drop()

    def select(self, rows: Sequence[int]) -> None:
        with self._told(SELECT, list(rows)):
            super().select(rows)

    def replace(self, rows: Sequence[int], other: SlotCache) -> None:
        assert isinstance(other, _Mirrored)
        with self._told(REPLACE, list(rows), other.number):
            super().replace(rows, other)


def _mirrored(kind: Any) -> Any:
    """The mirrored subclass of a class of caches."""
    return type(f"Mirrored{kind.__name__}", (_Mirrored, kind), {})


class TensorParallelTarget(Target):
    """This process's part of a causal target, with complete embedding, head and norms. Drafts read
    layers from the checkpoint's files (see `take_parts`)."""

    lean_allowed = False  # it packs weights, which would have to be whole
    team: TensorParallelTeam | None = None

    def __init__(self, *of_target: Any, fingerprint: str) -> None:
        self.processes = dist.get_world_size()
        super().__init__(*of_target, fingerprint=fingerprint)

    def as_twin(self, model: Any) -> Target:
        return Target(model, None, self.name, fingerprint="", checked=False)

    def _read(
        self,
        ids_BT: Tensor,
        needs: HiddenStateSpec,
        position_BT: Tensor | None,
        document_BT: Tensor | None,
    ) -> PassStates:
        with self._together(READ, ids_BT, position_BT, document_BT):
            return super()._read(ids_BT, needs, position_BT, document_BT)

    def _continued(
        self, ids_BT: Tensor, needs: HiddenStateSpec, cache: SlotCache, parents_BT: Tensor | None
    ) -> PassStates:
        number = cache.number if isinstance(cache, _Mirrored) else None
        with self._together(CONTINUE, number, ids_BT, parents_BT):
            return super()._continued(ids_BT, needs, cache, parents_BT)

    @contextmanager
    def _together(self, *command: Any) -> Iterator[None]:
        if self.team is None or not self.team.leads:
            yield
            return
        with self.team.together(*command):
            yield

    def follow(
        self, ids_BT: Tensor, position_BT: Tensor | None, document_BT: Tensor | None
    ) -> None:
        """Run the same forward pass as the first process."""
        self._read(ids_BT, HiddenStateSpec(), position_BT, document_BT)

    def follow_on(self, cache: SlotCache, ids_BT: Tensor, parents_BT: Tensor | None) -> None:
        """Run the same forward pass over a cache as the first process."""
        self._continued(ids_BT, HiddenStateSpec(), cache, parents_BT)

    def new_cache(self, capacity: int | None = None) -> SlotCache:
        require(
            capacity is None,
            f"{self.title} is divided over processes, so its passes are not compiled: give "
            "decode.compile=false",
        )
        cache = super().new_cache()
        return cache if self.team is None else self.team.watch(cache)

    def _state(self, module: Any, without: str | None = None) -> dict[str, Tensor]:
        raise UserError(
            f"{self.title} is divided over processes, but its layers are needed in one piece here: "
            "leave out target.tensor_parallel"
        )

    def take_parts(self, parts: TargetParts) -> None:
        """Share the embedding and the head with `parts`, so that a process holds them once, and
        read layers from where `parts` reads them."""
        pairs = [(self.embedding, parts.embedding), (self.head, parts.head)]
        pairs.append((self.model.get_output_embeddings(), parts.model.get_output_embeddings()))
        for ours, theirs in pairs:
            if ours.weight.shape == theirs.weight.shape:
                ours.weight = theirs.weight
        self.stored = parts.stored


def division_rules(
    cfg: TargetConfig, config: Any, kind: type[Target], weights: SafetensorsFiles | None
) -> dict[str, str]:
    """The changes to transformers' plan that divide the layers alone (`rules_of`). Raises UserError
    if the processes of this launch cannot divide this target, which is of this `kind`."""
    count, title = int(os.environ.get("WORLD_SIZE", "1")), f"target.path={cfg.path!r}"
    require(
        count > 1,
        "target.tensor_parallel=true divides the target over the processes of a launch, and there "
        "is one: start several with accelerate launch --num_processes N, or leave it out",
    )
    accelerator = torch.accelerator.current_accelerator()
    usual = "cpu" if accelerator is None else accelerator.type
    require(
        torch.device(cfg.device).type == usual,
        f"target.tensor_parallel uses the devices that torch finds ({usual}), not target.device="
        f"{cfg.device}: leave target.device out",
    )
    require_plain(config, title)
    require(
        weights is not None and kind.separable,
        f"{title} cannot be divided over processes: target.tensor_parallel needs a causal LM in "
        "safetensors: leave it out",
    )
    return rules_of(empty_model(cfg, config, kind.auto_class(config)), title, count)


def load_tensor_parallel(
    cfg: TargetConfig,
    path: str,
    config: Any,
    kind: type[Target],
    tokenizer: Any,
    weights: SafetensorsFiles | None,
) -> TensorParallelTarget:
    """This process's part of the target, for a resolved configuration. All processes load their
    parts at the same time. The first layers are also loaded undivided, for comparison."""
    rules, auto = division_rules(cfg, config, kind, weights), kind.auto_class(config)
    assert weights is not None  # `division_rules` rejects other checkpoints
    fingerprint = weights.fingerprint()
    name, alone = target_name(cfg), replace(cfg, tensor_parallel=False, packed=False)
    text = config.get_text_config(decoder=True)
    k, first = compared(text, depth_of(text)), copy.deepcopy(config)
    of_first = first.get_text_config(decoder=True)
    few = config_of_layers(of_first.to_dict(), list(range(k)))
    of_first.update(few | {"num_hidden_layers": k})
    try:
        with without_warnings():  # about the weights of the other layers
            of_plain = load_model(alone, path, first, auto), tokenizer, name, cfg.revision
            plain = Target(*of_plain, fingerprint=fingerprint)
        k = len(plain.layers)
        expected, reading = state_after(plain, k), (plain.reading, plain.counted)
        del plain
        model = load_model(cfg, path, config, auto, rules)
        target = TensorParallelTarget(model, tokenizer, name, cfg.revision, fingerprint=fingerprint)
    except UserError as error:
        raise UserError(
            f"target.path={cfg.path!r}: its divided layers cannot be compared with its first {k} "
            "layers in one piece, since one of the two cannot be loaded or read "
            f"({first_line(error)}): leave out target.tensor_parallel"
        ) from error
    require_same(target, k, expected)
    require(
        reading == (target.reading, target.counted),
        f"{target.title} reads on in another way when its layers are divided: leave out "
        "target.tensor_parallel",
    )
    target.weights = weights
    return target


def rules_of(model: Any, title: str, count: int) -> dict[str, str]:
    """The changes to transformers' plan for a model (on the meta device) with which `count`
    processes divide its layers, and nothing else. Raises UserError if there is no plan for its
    layers, or if the heads cannot be divided evenly."""
    plan, config = model.tp_plan or {}, model.config.get_text_config(decoder=True)
    require(
        any("*" in name for name in plan),
        f"{title} ({type(model).__name__}) has no plan in transformers by which its layers are "
        "divided: leave out target.tensor_parallel (target.device_map=auto spreads whole layers)",
    )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        counts = heads if isinstance(heads, list | tuple) else [heads or count]
        odd = next((n for n in counts if n % count), None)
        require(
            odd is None,
            f"{title}: {count} processes cannot share {odd} heads ({name}) evenly: start a number "
            f"of processes that divides {odd}",
        )
    return {name: "replicate" for name in plan if "*" not in name}


def require_plain(config: Any, title: str) -> None:
    """Raise UserError for a quantised checkpoint."""
    require(
        method(config) is None,
        f"{title} is stored quantised ({method(config)}), which has not been tried with "
        "target.tensor_parallel: leave it out, or give a checkpoint that is not quantised",
    )


def count_of_divided_weights(model: Any) -> int:
    """The number of a model's weights that `rules_of` divides over processes; 0 if there is no
    plan."""
    plan, count = model.tp_plan or {}, 0
    for name, weight in model.named_parameters():
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        style = plan.get(generic) or plan.get(generic.rpartition(".")[0])
        count += weight.numel() if "*" in generic and style in DIVIDING else 0
    return count


def compared(config: Any, count: int) -> int:
    """The number of a config's `count` layers, from the first on, to compare with undivided ones:
    enough to include all kinds of layers, at least two, and at most `MOST`."""
    by_layer = [
        kind_of_layer
        for name in ("layer_types", "mlp_layer_types", "no_rope_layers")
        if len(kind_of_layer := getattr(config, name, None) or ()) == count
    ]
    dense = getattr(config, "first_k_dense_replace", None) or 0
    kinds = [(k < dense, *map(str, kind)) for k, kind in enumerate(zip(range(count), *by_layer))]
    kinds = [(first, *others) for first, _, *others in kinds]
    last = max(kinds.index(kind) for kind in set(kinds))
    return min(max(2, last + 1), MOST, count)


@torch.no_grad()
def state_after(target: Target, k: int) -> Tensor:
    """The output of the k-th layer for a text: [1, T, D], or more for a model with several
    streams."""
    ids = (7 * torch.arange(24, device=target.device)[None] + 3) % target.vocab_size
    seen = list[Tensor]()

    def note_output(_layer: Any, _args: Any, out: Any) -> None:
        seen.append(out[0] if isinstance(out, list | tuple) else out)

    with target.layers[k - 1].register_forward_hook(note_output):
        target.body(input_ids=ids, use_cache=False)
    return seen[-1]


def require_same(target: TensorParallelTarget, k: int, plain: Tensor) -> None:
    """Raise UserError unless the divided layers give the same output as `plain` ones, up to
    rounding."""
    exact = target.dtype in (torch.float32, torch.float64)
    off = distance(state_after(target, k), plain)
    require(
        off <= (SHARP if exact else ROUGH),
        f"{target.title}: its first layers compute something else when transformers divides them, "
        f"or when the model is loaded with these layers alone (off by {off:.1g}): leave out "
        "target.tensor_parallel",
    )


def _is_lost(error: Exception) -> bool:
    """Whether an error means that another process has ended; that process has reported the reason,
    if it could."""
    return isinstance(error, dist.DistError) or "Connection closed by peer" in str(error)


def _moved(value: Any, device: torch.device) -> Any:
    """A value with all its tensors moved to this device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_moved(x, device) for x in value)
    return value

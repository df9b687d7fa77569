"""Beam search, vanilla and speculative: the hypotheses of transformers' own search in fewer forward
passes.

A draft runs its own, wider beam search for γ steps after the live beams (Leviathan et al. 2023,
outlook). One pass of the target scores that whole tree, and the target's beam search is replayed
over it, as long as each of its live beams is a drafted node. The step that leaves the tree is kept
too, so a speculation step that accepts n drafted beam steps makes n + 1.

All beams share one row of the target's cache, as a tree, so common text is stored and attended to
once. Each pass writes its nodes into scratch slots after the committed trunk, and the mask hides
the slots of dead beams. When there are many scratch slots, the text common to all live beams is
committed and the rest is dropped; the next pass recomputes the few live tokens after it. Drafters
only support rows, so they get a row for each beam (`Rows`).
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from specdec.context import Context, HiddenStateSpec
from specdec.decoding.decode import require_room
from specdec.decoding.rows import Rows, each
from specdec.drafters.base import Drafter, vocabulary
from specdec.errors import require, require_between
from specdec.targets.target import Target

SCRATCH = 256  # slots of the target's cache that dead beams may fill before they are cleared
COMMITTED = -1  # the slot of a node that is part of the trunk
NEVER = -1e9  # transformers' score for candidates that must not be chosen


@dataclass(eq=False)
class BeamNode:
    """A token of some beam, and the beam that it follows; the root is the prompt."""

    token: int
    parent: "BeamNode | None"
    slot: int | None = None  # its scratch slot in the target's cache; None: it has none

    def path(self) -> "list[BeamNode]":
        """The nodes from the first generated token to this one."""
        nodes, node = list[BeamNode](), self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


Places = dict[BeamNode | None, int]
Children = dict[tuple[BeamNode, int], BeamNode]  # by parent and token


@dataclass
class Hypothesis:
    ids: list[int]  # the new tokens, with the eos that ended them
    score: float  # their log-probability over length ** length_penalty


@dataclass
class BeamSpeculationStep:
    """One pass of the target over the live beams and the tokens drafted after them."""

    drafted: int  # beam steps
    accepted: int  # drafted steps that the target also made; the step then made one more
    nodes: int  # drafted tokens


@dataclass
class BeamResult:
    """The result of a beam search, and its cost; prefill does not count as a pass."""

    prompt: list[int]
    hypotheses: list[Hypothesis]  # best first
    speculation_steps: list[BeamSpeculationStep]  # one per pass
    seconds: float  # time of the speculation steps

    @property
    def ids(self) -> list[int]:
        """The best hypothesis."""
        return self.hypotheses[0].ids

    @property
    def steps(self) -> int:
        """All beam steps, including the one that prefill makes."""
        return 1 + sum(r.accepted + 1 for r in self.speculation_steps)

    @property
    def tau(self) -> float:
        """Beam steps per target pass, pooled."""
        return (
            (self.steps - 1) / len(self.speculation_steps) if self.speculation_steps else math.nan
        )


@dataclass
class Search:
    """transformers' beam search over one prompt (`GenerationMixin._beam_search`), one step per
    call, with the same float32 operations in the same order: equal log-probabilities give equal
    results, even for ties. Work for the synchronisation of batches is omitted."""

    root: InitVar[BeamNode]
    beams: int
    limit: int
    eos: Tensor
    length_penalty: float
    early_stopping: bool | str
    length: int = 0  # generated tokens of every live beam
    done: bool = False

    def __post_init__(self, root: BeamNode) -> None:
        never_B = torch.full((self.beams,), NEVER, device=self.eos.device)
        self.live, self.score_B = [root] * self.beams, never_B.clone()
        self.score_B[0] = 0  # all beams are equal: these scores let only the first go on
        self.best, self.best_score_B = [root] * self.beams, never_B  # hypotheses that ended
        self.finished_B = torch.zeros_like(never_B, dtype=torch.bool)

    def step(self, log_p_BV: Tensor, known: Children) -> None:
        """Extend every beam by one token, given log p of the live beams; reuse `known` nodes."""
        B, V = self.beams, log_p_BV.shape[1]
        most = max(2, 1 + len(self.eos)) * B  # so that B remain even if every beam could end
        total_C, index_C = (log_p_BV + self.score_B[:, None]).flatten().topk(most)
        token_C = index_C % V
        ends_C = torch.isin(token_C, self.eos) | (self.length + 1 >= self.limit)
        pairs = list(zip((index_C // V).tolist(), token_C.tolist(), strict=True))

        def node(c: int) -> BeamNode:
            parent, token = self.live[pairs[c][0]], pairs[c][1]
            return known.setdefault((parent, token), BeamNode(token, parent))

        counts_C = ends_C & (torch.arange(most, device=ends_C.device) < B)
        final_C = total_C / (self.length + 1) ** self.length_penalty + ~counts_C * NEVER
        merged = torch.cat([self.best_score_B, final_C])
        best_B = merged.topk(B).indices
        self.best = [self.best[i] if i < B else node(i - B) for i in best_B.tolist()]
        self.best_score_B = merged[best_B]
        self.finished_B = torch.cat([self.finished_B, counts_C])[best_B]

        running_C = total_C + ends_C * NEVER
        chosen_B = running_C.topk(B).indices
        self.live, self.score_B = [node(c) for c in chosen_B.tolist()], running_C[chosen_B]
        self.length += 1

        later = self.early_stopping == "never" and self.length_penalty > 0
        hope = self.score_B[0] / (self.limit if later else self.length) ** self.length_penalty
        worst_B = torch.where(self.finished_B, self.best_score_B.min(), NEVER)
        full = self.early_stopping is True and self.finished_B.all()
        self.done = bool((hope <= worst_B).all() | full | ends_C.all())


class LiveTree:
    """The live beams in one row of the target's cache (see the top of this file)."""

    def __init__(self, target: Target, needs: HiddenStateSpec, prompt: Sequence[int]) -> None:
        self.target, self.needs, self.cache = target, needs, target.new_cache()
        self.reread = 0  # number of nodes in the last pass that reread forgotten tokens
        ids_1T = torch.tensor([list(prompt)], device=target.device)
        self.hidden_states, final_1TD = target.hidden_states(ids_1T, needs, cache=self.cache)
        self.cache.commit([len(prompt)])
        self.log_p_GV = self._log_p(final_1TD[0, -1:])

    def score(self, anchors: list[BeamNode], drafted: list[BeamNode]) -> None:
        """One pass over the last tokens of the live beams and those drafted after them (parents
        first), preceded by live tokens that were dropped. Sets `hidden_states` and `log_p_GV` of
        both."""
        lost = dict.fromkeys(n for a in anchors for n in a.path()[:-1] if n.slot is None)
        new, parents = [*lost, *anchors, *drafted], []
        for slot, node in enumerate(new, self.cache.scratch):
            assert node.parent is not None
            parents.append(node.parent.slot)
            node.slot = slot
        if lost:
            self.reread = len(new)
        device = self.target.device
        hidden_states, final_1GD = self.target.hidden_states(
            torch.tensor([[n.token for n in new]], device=device),
            self.needs,
            cache=self.cache,
            parents_BT=torch.tensor([parents], device=device),
        )
        self.hidden_states = each(hidden_states, lambda x_1GD: x_1GD[:, len(lost) :])
        self.log_p_GV = self._log_p(final_1GD[0, len(lost) :])

    def settle(self, live: list[BeamNode]) -> None:
        """If scratch is full, commit the tokens that the live beams share, and drop the rest."""
        if self.cache.scratch <= max(SCRATCH, 2 * self.reread):
            return
        paths = [[n for n in node.path()[:-1] if n.slot != COMMITTED] for node in live]
        shared = [nodes[0] for nodes in zip(*paths, strict=True) if len(set(nodes)) == 1]
        path_1K = torch.tensor([[n.slot for n in shared]], device=self.target.device).long()
        self.cache.commit([len(shared)], path_1K)
        for node in itertools.chain(*paths):
            node.slot = COMMITTED if node in shared else None

    def _log_p(self, final_GD: Tensor) -> Tensor:
        return self.target.logits(final_GD).float().log_softmax(-1)


class DraftBeams:
    """The draft's own beam search, over a drafter with a row for each live beam."""

    def __init__(
        self, drafter: Drafter, root: BeamNode, prompt: Sequence[int], ctx: Context, eos_ids: Tensor
    ) -> None:
        self.draft_growth, self.vocab_S = drafter.draft_growth, vocabulary(drafter)
        self.eos_ids, self.live = eos_ids, [root]
        self.rows, self.cache = Rows([prompt], eos_ids.device), drafter.new_cache()
        if len(prompt) > 1:  # the shared prompt is read once, before rows are repeated
            self.rows.extend([[]], ctx, [len(prompt) - 1])
            if self.cache is not None:
                self.draft_growth(self.rows.context(), self.cache)

    def follow(
        self, live: list[BeamNode], steps: int, hidden_states: Context, place: Places
    ) -> None:
        """Give every live beam the row of the beam that it continues by `steps` tokens, with the
        hidden states of the last pass, in which `place` gives the index of each node."""
        row: Places = {node: b for b, node in enumerate(self.live)}
        paths = [node.path()[-steps:] for node in live]
        before = [path[0].parent for path in paths]
        if (origin := [row[node] for node in before]) != list(range(len(self.live))):
            self.rows.select(origin)
            if self.cache is not None:
                self.cache.select(origin)
        seen = [[place[n] for n in (a, *path[:-1])] for a, path in zip(before, paths, strict=True)]
        self.rows.extend(
            [[n.token for n in path] for path in paths],
            each(hidden_states, lambda x_1GD: x_1GD.expand(len(live), -1, -1)),
            [steps] * len(live),
            torch.tensor(seen, device=self.eos_ids.device),
        )
        self.live = live

    def grow(self, score_B: Tensor, width: int, depth: int, known: Children) -> int:
        """Search `depth` steps with `width` beams, beginning with the live beams and their true
        scores, and add the nodes to `known`. Returns the depth that the search reached. At each
        depth, every row grows as many nodes as the row with the most; surplus nodes have a score of
        -inf. Eos is not drafted, since nothing follows it."""
        growth, vocab_S = self.draft_growth(self.rows.context(), self.cache), self.vocab_S
        logits_BTS, S = growth.logits_BS[:, None], growth.logits_BS.shape[1]
        ids_S = torch.arange(S, device=score_B.device) if vocab_S is None else vocab_S
        ends_S, ids = torch.isin(ids_S, self.eos_ids), ids_S.tolist()
        # each row's nodes that grow next: (node, its parent's number in the growth, score)
        front = [[(node, -1, s)] for node, s in zip(self.live, score_B.tolist(), strict=True)]
        first, count = -1, 0  # the number of the front's first node; how many are numbered
        for d in range(depth):
            if d > 0:
                tokens = [[node.token for node, _, _ in nodes] for nodes in front]
                parents = [[parent for _, parent, _ in nodes] for nodes in front]
                logits_BTS = growth.grow(ids_S.new_tensor(tokens), ids_S.new_tensor(parents))
                first, count = count, count + len(front[0])
            score_BT = score_B.new_tensor([[score for _, _, score in nodes] for nodes in front])
            log_q_BTS = logits_BTS.float().log_softmax(-1).masked_fill(ends_S, -torch.inf)
            total = (score_BT[..., None] + log_q_BTS).nan_to_num(-torch.inf, neginf=-torch.inf)
            best_C, index_C = total.flatten().topk(min(width, total.numel()))
            grown: list[list[tuple[BeamNode, int, float]]] = [[] for _ in front]
            for score, index in zip(best_C.tolist(), index_C.tolist(), strict=True):
                if score > -math.inf:
                    b, f = divmod(index // S, len(front[0]))
                    parent, token = front[b][f][0], ids[index % S]
                    node = known.setdefault((parent, token), BeamNode(token, parent))
                    grown[b].append((node, first + f, score))
            if not any(grown):
                return d
            surplus, num_read = (BeamNode(0, None), first, -math.inf), max(map(len, grown))
            front = [nodes + [surplus] * (num_read - len(nodes)) for nodes in grown]
        return depth


@torch.inference_mode()
def beam_search(
    target: Target,
    prompt: Sequence[int],
    *,
    beams: int,
    max_new_tokens: int,
    drafter: Drafter | None = None,
    draft_beams: int | None = None,
    gamma: int = 4,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    eos: tuple[int, ...] | None = None,
) -> BeamResult:
    """The `beams` best continuations of a prompt, the same as those of transformers'
    `generate(num_beams=beams, do_sample=False)`; with a drafter, by speculation. `draft_beams`
    (None: twice `beams`) is the width of the draft's own search and `gamma` its depth. A score is
    the log-probability over length ** `length_penalty`. `early_stopping` True stops at `beams`
    finished hypotheses, False when the best live beam at its present length is worse than all of
    them, "never" when it would be worse at any length. One beam is greedy decoding. `eos` None
    takes the target's own; () has none. Raises UserError as `require_room` does, and for a number
    out of range."""
    width = 2 * beams if draft_beams is None else draft_beams
    require_room(target, [prompt], max_new_tokens, drafter)
    require_between("beams", beams, 1)
    require(
        target.reads_trees,
        f"{target.title} {target.only_chains}: decode without beams",
    )
    require(
        early_stopping in (True, False, "never"),
        f"early_stopping={early_stopping!r} is unknown: give true, false or never",
    )
    if drafter is not None:
        deepest = drafter.limits.depth or gamma
        require(width >= beams, f"draft_beams={width} is below beams={beams}: give as many or more")
        require_between("gamma", gamma, 1)
        require(gamma <= deepest, f"gamma={gamma}: this draft makes at most {deepest} steps")
    eos_ids = torch.tensor(target.eos if eos is None else eos, device=target.device).long()
    early_stopping = True if beams == 1 else early_stopping

    root = BeamNode(prompt[-1], None, COMMITTED)
    search = Search(root, beams, max_new_tokens, eos_ids, length_penalty, early_stopping)
    tree = LiveTree(target, HiddenStateSpec() if drafter is None else drafter.needs, prompt)
    draft = DraftBeams(drafter, root, prompt, tree.hidden_states, eos_ids) if drafter else None
    tree.hidden_states = each(tree.hidden_states, lambda x_1TD: x_1TD[:, -1:])
    place: Places = {root: 0}  # the index of each node in the target's last pass
    known: Children = {}
    search.step(tree.log_p_GV[[0] * beams], known)
    steps, speculation_steps, began = 1, list[BeamSpeculationStep](), time.perf_counter()

    while not search.done:
        known, depth = {}, 0
        if draft is not None:
            draft.follow(search.live, steps, tree.hidden_states, place)
            if depth := min(gamma, max_new_tokens - search.length - 1):
                depth = draft.grow(search.score_B, width, depth, known)
        drafted = list(known.values())

        tree.settle(search.live)
        anchors = list(dict.fromkeys(search.live))
        tree.score(anchors, drafted)
        place = {node: i for i, node in enumerate([*anchors, *drafted])}

        steps = 0
        while not search.done and all(node in place for node in search.live):
            search.step(tree.log_p_GV[[place[node] for node in search.live]], known)
            steps += 1
        speculation_steps.append(BeamSpeculationStep(depth, steps - 1, len(drafted)))

    texts = [[node.token for node in end.path()] for end in search.best]
    hypotheses = [*map(Hypothesis, texts, search.best_score_B.tolist())]
    return BeamResult(list(prompt), hypotheses, speculation_steps, time.perf_counter() - began)

"""Export to what serving engines load, read back and compared before it is called done.

Layouts: `hf` is what vLLM and SGLang load by method (eagle3, medusa, draft_model);
`speculators` is vLLM's self-describing format (eagle3 alone). Weights are written in the
precision they were trained in: an engine casts them to the target's, as our decoder does.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.context import Context
from specdec.drafters import Drafter
from specdec.drafters.models.lm import LM
from specdec.drafters.parallel.medusa import Medusa
from specdec.drafters.recurrent.eagle3 import Eagle3
from specdec.errors import UserError, nearest, require
from specdec.files import replaced
from specdec.formats.draft import require_finite, require_same, untied
from specdec.runtime.packed import is_packed, pack
from specdec.target.causal import Target

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MARK = "draftsmith.json"  # of an export of ours, which a new one may replace

Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]  # tensors and config, as an engine reads


def eagle3_hf(drafter: Eagle3, target: Target) -> Checkpoint:
    """EAGLE-3 as vLLM and SGLang name it."""
    ids = list(drafter.needs.layers)
    config = {
        **drafter.llama.to_dict(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": drafter.lm_head.out_features,
        "target_hidden_size": target.width,
        "norm_before_residual": drafter.config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": ids,
        "num_aux_hidden_states": len(ids),
        # SGLang reads this one alone, and adds 1 to each
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [k - 1 for k in ids],
            "use_aux_hidden_state": True,
        },
    }
    return _eagle3_tensors(drafter, "midlayer"), _with_tokens(config, target)


def eagle3_speculators(drafter: Eagle3, target: Target) -> Checkpoint:
    """EAGLE-3 in the speculators format: `vllm serve DIR` needs nothing else."""
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": {
            **drafter.llama.to_dict(),
            "model_type": "llama",
            "num_hidden_layers": 1,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": drafter.config.depth}
            ],
            "verifier": {
                "name_or_path": target.name,
                "architectures": list(target.model.config.architectures or []),
            },
        },
        "draft_vocab_size": drafter.lm_head.out_features,
        "target_hidden_size": target.width,
        "eagle_aux_hidden_state_layer_ids": list(drafter.needs.layers),
        "norm_before_residual": drafter.config.norm_before_residual,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
    }
    return _eagle3_tensors(drafter, "layers.0"), config


def medusa_hf(drafter: Medusa, target: Target) -> Checkpoint:
    """Medusa as vLLM names it, always with the whole vocabulary.

    vLLM 0.32 refuses its own `token_map`, so the tokens outside a pruned vocabulary get rows of
    zeros: their logit is 0, and the engine, which drafts greedily, never takes one while the
    best logit is above 0 (which `write` checks on a probe, as any trained head's is).
    """
    state = {name: x.detach() for name, x in drafter.state_dict().items()}
    if (vocab_S := state.pop("vocab_S", None)) is not None:
        for name in [n for n in state if n.startswith("lm_heads.")]:
            whole = state[name].new_zeros(target.vocab_size, target.width)
            whole[vocab_S] = state[name]
            state[name] = whole
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.width,
        "vocab_size": target.vocab_size,
        "num_heads": drafter.config.depth,
        "num_hidden_layers": drafter.config.num_layers,
        "medusa_fc_bias": False,
        "original_lm_head": drafter.config.shared_head,
    }
    return state, config


def lm_hf(drafter: LM, target: Target) -> Checkpoint:
    """A plain Hugging Face checkpoint, for `method: draft_model`."""
    tensors = {n.removeprefix("model."): x for n, x in untied(drafter.state_dict()).items()}
    config = drafter.model.config
    described = {**config.to_dict(), "architectures": [type(drafter.model).__name__]}
    return tensors, _with_tokens(described, target)


LAYOUTS: dict[tuple[str, str], Callable[[Any, Target], Checkpoint]] = {
    ("eagle3", "hf"): eagle3_hf,
    ("eagle3", "speculators"): eagle3_speculators,
    ("medusa", "hf"): medusa_hf,
    ("lm", "hf"): lm_hf,
}


def write(folder: Path, drafter: Drafter, target: Target, layout: str = "hf") -> str:
    """Export a draft; returns a line that says what was compared.

    The checkpoint is written, read back as an engine would, and must give the same logits as
    the drafter on real input; a folder appears only if it does. Raises UserError for a layout
    that this family has not, for a weight that is missing or not finite, and for a folder that
    holds something else than an earlier export.
    """
    name = drafter.config.name
    if (name, layout) not in LAYOUTS:
        known = [b for a, b in LAYOUTS if a == name]
        if not known:
            raise UserError(f"drafter {name!r} has no weights: engines have it built in")
        raise UserError(f"export layout {layout!r} of {name!r} is unknown{nearest(layout, known)}")
    require_free(folder)
    tensors, config = LAYOUTS[name, layout](drafter, target)
    tensors = {n: x.detach().cpu().contiguous() for n, x in tensors.items()}
    require_finite(tensors, f"{folder}: not written")
    config["dtype"] = config["torch_dtype"] = str(_dtype(tensors)).removeprefix("torch.")
    with replaced(folder) as partial:
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True))
        about = {"drafter": name, "layout": layout, "target": target.name}
        (partial / MARK).write_text(json.dumps(about, indent=1))
        if name == "lm":
            target.tokenizer.save_pretrained(partial)
        gap, best = compare(drafter, read(partial, drafter, target), target)
        if name == "medusa" and drafter.vocab_S is not None and best <= 0:
            raise UserError(f"{folder}: not written, its best logit is {best:.2g}: train it")
        if gap > 0:
            raise UserError(f"{folder}: not written, logits read back differ by {gap:.2g}")
    return f"{len(tensors)} tensors read back, logits identical"


def require_free(folder: Path) -> None:
    """Raise UserError where writing here would destroy anything but an earlier export."""
    free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(
        free or (folder / MARK).is_file(),
        f"{folder} holds something that is no export of ours: give a folder that is not there",
    )


def read(folder: Path, like: Drafter, target: Target) -> Drafter:
    """An exported checkpoint as a drafter again, for its family and target.

    Raises UserError, naming the tensor, for a checkpoint that is not complete.
    """
    try:
        tensors = load_file(folder / WEIGHTS)
        config = json.loads((folder / CONFIG).read_text())
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise UserError(f"{folder} is no complete export: {error}") from error
    drafter = type(like)(like.config, like.sizes)
    if "speculators_config" in config:
        tensors = {n.replace("layers.0.", "midlayer.", 1): x for n, x in tensors.items()}
    if isinstance(like, LM):
        tensors = {f"model.{n}": x for n, x in tensors.items()}
    if (offset := tensors.pop("d2t", None)) is not None:
        tensors["vocab_S"] = offset + torch.arange(len(offset))
        inside = tensors.pop("t2d").nonzero()[:, 0]
        if not torch.equal(inside, tensors["vocab_S"]):
            raise UserError(f"{folder}: d2t and t2d disagree")
    if isinstance(like, Medusa) and like.vocab_S is not None and "lm_heads.0.weight" in tensors:
        rows = tensors["lm_heads.0.weight"].any(-1).nonzero()[:, 0]
        heads = [n for n in tensors if n.startswith("lm_heads.")]
        tensors |= {"vocab_S": rows, **{n: tensors[n][rows] for n in heads}}
    require_same(tensors, untied(drafter.state_dict()), folder / WEIGHTS)
    drafter.load_state_dict(tensors, strict=False)
    drafter.to(target.device, next(like.parameters()).dtype)
    drafter.attach(target)
    if is_packed(like):  # products are then summed in one order
        pack(drafter)
    return drafter.eval()


@torch.no_grad()
def compare(one: Drafter, other: Drafter, target: Target) -> tuple[float, float]:
    """Largest difference of the two drafters' logits over a few anchors of a short text, and the
    least of the best logits there."""
    ids = torch.arange(3, 35, device=target.device)[None] % target.vocab_size
    ctx, _ = target.features(ids, one.needs)
    ctx = Context(ids, ctx.layers_BTF, ctx.final_BTD)
    anchors = torch.tensor([[4, 17, 30]], device=target.device)
    gap, best = 0.0, torch.inf
    states = [d.hidden(ctx, anchors, None) for d in (one, other)]
    for k in range(states[0].shape[2]):
        a, b = (d.unembed(s[:, :, k], k) for d, s in zip((one, other), states, strict=True))
        gap = max(gap, float((a - b).abs().max()))
        best = min(best, float(a.amax(-1).min()))
    return gap, best


def _eagle3_tensors(drafter: Eagle3, layer: str) -> dict[str, Tensor]:
    state = dict(drafter.state_dict())
    vocab = state.pop("vocab_S", None)
    tensors = {
        (n.replace("midlayer", layer, 1) if n.startswith("midlayer.") else n): x.detach()
        for n, x in state.items()
    }
    if vocab is not None:  # with the full vocabulary engines want neither
        tensors["d2t"] = vocab - torch.arange(len(vocab), device=vocab.device)
        tensors["t2d"] = torch.zeros(drafter.target_vocab, dtype=torch.bool, device=vocab.device)
        tensors["t2d"][vocab] = True
    return tensors


def _with_tokens(config: dict[str, Any], target: Target) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {**config, **{n: getattr(target.config, n, None) for n in names}}


def _dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    return next(x.dtype for x in tensors.values() if x.is_floating_point())

"""The fused fast paths of a CPU, behind one switch.

A decoding step on a CPU multiplies few rows by large weights, and transformers' modules then spend
as much time on calls as on products. Each path below computes the same numbers as the public
operators, up to rounding, and is used only where a check or a rule says so.

| module | path | used for | turned off alone by |
| --- | --- | --- | --- |
| `packed_linear` | products by weights in oneDNN's layout | x86 CPU; float32, bfloat16, float16; \
the numbers of rows that `pays` names | `target.packed=false` |
| `lean_pass` | a pass without the model's modules | a CPU target with layers of Llama's shape; up \
to 1,024 tokens; no hooks, adapters or autograd | a failed self-check of the target |
| `few_row_norm` | RMSNorm as one LayerNorm | drafts and the lean pass on a CPU; up to 16 rows | |
| `grouped_attention` | query heads of one KV head as rows of one query | any device; \
up to 256 query rows of a KV head | `target.attn_implementation=sdpa` |
| `compiled_pass` | a pass through `torch.compile` | any device; caches of fixed capacity; drafts: \
up to 16 tokens a row | `decode.compile=false` (the default) |
| `machine_probes` | what the processor is, and whether a path runs and agrees here | all of the \
above | |

`DRAFTSMITH_CPU_FAST_PATHS=0` in the environment turns all of them off on a CPU: use it to find out
whether a difference comes from one of them. Grouped attention then is off on every device. The
variable is read once, when this package is imported.
"""

import os

SWITCH = "DRAFTSMITH_CPU_FAST_PATHS"
_ON = os.environ.get(SWITCH, "1") != "0"


def fast_paths_on() -> bool:
    """Whether the fast paths of this package may be used at all."""
    return _ON

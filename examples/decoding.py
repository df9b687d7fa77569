"""Decode with a trained draft from Python, several prompts in one batch.

python examples/decoding.py runs/quickstart/best "Why is the sky blue?" "Name three rivers."
"""

import sys

from transformers import GenerationConfig

from specdec.decoding.speculative import speculative_generate
from specdec.errors import command, require
from specdec.formats.draft_checkpoint import load_draft, read_card
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig


def main(folder: str = "", *prompts: str) -> None:
    require(bool(folder and prompts), "give the folder of a draft, and one prompt or more")
    trained_for = read_card(folder).target
    # in float32, responses equal those of vanilla decoding; in bfloat16, rounding may decide
    # between two tokens that are almost equally likely
    target = load_target(TargetConfig(trained_for.name, "float32", revision=trained_for.revision))
    drafter = load_draft(folder, target)  # refused if it was trained for other weights

    inputs = target.tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    greedy = GenerationConfig(max_new_tokens=48, do_sample=False)
    drafted = speculative_generate(target, drafter, **inputs, generation_config=greedy)
    plain = speculative_generate(target, None, **inputs, generation_config=greedy)

    for prompt, response in zip(prompts, drafted.generations, strict=True):
        print(f"> {prompt}\n{target.tokenizer.decode(response.ids, skip_special_tokens=True)}\n")
    pairs = zip(drafted.generations, plain.generations, strict=True)
    same = sum(ours.ids == theirs.ids for ours, theirs in pairs)
    print(f"{drafted.tau:.2f} tokens per pass of the target")
    print(f"{same} of {len(prompts)} responses are those of vanilla decoding, token for token")


if __name__ == "__main__":
    command(lambda: main(*sys.argv[1:]))

"""A decoder's speculation steps in a file, for training at the anchors that it visited. The file
has a JSON line for each response (`Logged`)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from specdec.decoding.generation import Generation
from specdec.errors import require
from specdec.integrity import sealed

# for each: the anchor's position in prompt + response, the number of accepted tokens, the draft
LoggedSteps = list[tuple[int, int, tuple[int, ...]]]


@dataclass
class Logged:
    """One line of a log of speculation steps."""

    prompt: list[int]
    ids: list[int]  # of the response
    speculation_steps: LoggedSteps

    def fits(self, vocab_size: int) -> bool:
        """Whether this line can be from a response of a target with this vocabulary."""
        texts = [self.prompt, self.ids, *(tokens for _, _, tokens in self.speculation_steps)]
        end = len(self.prompt) + len(self.ids)
        return (
            bool(self.prompt and self.ids)
            and all(0 <= token < vocab_size for ids in texts for token in ids)
            and all(0 < at < end and 0 <= n <= len(ids) for at, n, ids in self.speculation_steps)
        )


def logged_steps(response: Generation) -> LoggedSteps:
    """The speculation steps of a response in the format of a log. Raises UserError if trees were
    drafted."""
    require(
        all(r.tokens or not r.nodes for r in response.steps),
        "a log of speculation steps holds chains only: leave out --tree",
    )
    return [(r.anchor, r.accepted, r.tokens) for r in response.steps]


def log_steps(path: Path, responses: Sequence[Generation]) -> None:
    """Append the speculation steps of some responses to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for response in responses:
            line = Logged(response.prompt, response.ids, logged_steps(response))
            file.write(json.dumps(sealed(asdict(line))) + "\n")

"""Kills an engine and the run that it serves, again and again at random moments."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from benches.launching import started
from benches.serving import ServedEngine
from benches.turns import show

from specdec.errors import UserError, require
from specdec.progress import console

ENDS = 900  # seconds that a run may take
DELAY = 0.5  # the kill comes at most so many seconds after the last awaited response
AT_ONCE = 8  # requests of the run
VICTIMS = (("engine",), ("run",), ("engine", "run"))


def engine_kills(
    *,
    count: Annotated[int, "SIGKILLs of the engine, of the run, or of both"] = 10,
    conversations: Annotated[int, "that the engine answers"] = 120,
    seed: Annotated[int, "of the moments and of who is killed"] = 1,
) -> None:
    """SIGKILLs of vLLM, of a run with `hidden_states.from`, and of both, at random moments.

    After each kill, the killed processes are started again. No start of the run may request more
    responses than were missing. At the end, the run must have one response to each prompt and must
    have trained. Its responses are compared with those of a run that is never killed.
    """
    draw, rows = random.Random(seed), list[list[str]]()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        server = ServedEngine(folder, "drafter=eagle3_small", "target.dtype=float32")
        whole, killed = (
            EngineKilledRun(folder / x, server.url, conversations) for x in ("whole", "killed")
        )
        try:
            server.launch()
            whole.launch()
            whole.ended()
            while len(rows) < count:
                server.launch()
                known, asked = len(killed.responses()), server.responses
                killed.launch()
                wanted = draw.randint(1, max(1, conversations // count))
                while killed.running and server.responses < asked + wanted:
                    time.sleep(0.05)
                time.sleep(draw.uniform(0, DELAY))
                victims = draw.choice(VICTIMS)
                too_late = f"the run ended after {len(rows)} kills: give more --conversations"
                require(killed.running, too_late)
                if "run" in victims:
                    killed.kill()
                if "engine" in victims:
                    server.kill()
                    killed.stopped()
                require_missing(len(whole.responses()) - known, server.responses - asked)
                kept = len(killed.responses())
                rows.append([" and ".join(victims), *map(str, (server.responses - asked, kept))])
                console.print(*rows[-1], sep=" | ")
            server.launch()
            known, asked = len(killed.responses()), server.responses
            killed.launch()
            killed.ended()
            require_missing(len(whole.responses()) - known, server.responses - asked)
            left = len(list((folder / "states").iterdir()))
        finally:
            for one in (whole, killed, server):
                one.kill()
        mine, theirs = killed.responses(), whole.responses()
        require(mine.keys() == theirs.keys(), "the two runs answered different prompts")
        same = sum(mine[name] == theirs[name] for name in mine)
    show(["killed", "responses since its start", "responses kept so far"], rows)
    console.print(
        f"{len(rows)} kills: {len(mine)} prompts have one response each, {same} of them as in the "
        "run that was never killed; no start requested more than were missing; killed runs left "
        f"{left} files of states, which the next start of scripts/serve removes"
    )


def require_missing(missing: int, asked: int) -> None:
    require(asked <= missing, f"{asked} responses were requested, but only {missing} were missing")


class EngineKilledRun:
    """A run of train.py whose responses and hidden states come from an engine, in its own
    folder."""

    def __init__(self, folder: Path, url: str, conversations: int) -> None:
        folder.mkdir()
        self.folder = folder
        overrides = f"""
            experiment=quickstart budget.minutes=null combine_with=null decode.prompts=0 track=none
            target.dtype=float32 loop.epochs=1 responses.max_new_tokens=48 responses.batch={AT_ONCE}
            hidden_states.from={url} data.limit={conversations} hydra.run.dir={folder / "run"}
            responses.root={folder / "responses"} hidden_states.root={folder / "hidden_states"}
        """
        self.command = [sys.executable, "train.py", *overrides.split()]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def launch(self) -> None:
        """Start the run, unless it is running."""
        if not self.running:
            self.process = started(self.command, self.folder / "log")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stopped(self) -> None:
        """Wait until the run stops by itself, as it should when no engine responds."""
        if self.process is not None and self.process.wait(ENDS) not in (2, -signal.SIGKILL):
            raise UserError(f"the run ended with {self.process.returncode}: {self._said()}")

    def ended(self) -> None:
        """Wait until the run has ended successfully."""
        if self.process is not None and self.process.wait(ENDS):
            raise UserError(f"the run ended with {self.process.returncode}: {self._said()}")
        require((self.folder / "run" / "export").is_dir(), f"no draft: {self._said()}")

    def responses(self) -> dict[str, Sequence[int]]:
        """The stored responses, by the name of the prompt. Raises UserError if a prompt has two."""
        lines = [
            x for p in self.folder.glob("responses/**/*.jsonl") for x in p.open(encoding="utf-8")
        ]
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        found = {entry["prompt"]: entry["ids"] for entry in entries}
        require(len(found) == len(entries), "a prompt has two responses")
        return found

    def _said(self) -> str:
        return (self.folder / "log").read_text(errors="replace", encoding="utf-8")[-2000:]

"""Whether a run's draft was measured before, in the same way: then it is not measured again."""

from dataclasses import asdict
from pathlib import Path

import specdec
from specdec.errors import UserError
from specdec.files import read_json, write_json
from specdec.formats import draft as drafts
from specdec.integrity import of_file, of_value
from specdec.measure.machine import machine_of
from specdec.measure.results import FILE, Results
from train.job import Job
from train.texts import Texts

RECORD = "measured.json"  # in the report's folder: how its results were measured


def note(job: Job, texts: Texts, processes: int) -> None:
    """Write down how the results in the report's folder were measured."""
    write_json(job.folder / "report" / RECORD, {"how": _how(job, texts, processes)})


def results_of(job: Job, texts: Texts, processes: int) -> Results | None:
    """The results of the run, if they are on the disk as they were written, and if measuring would
    do the same once more: the same draft and prompts, settings, machine and code."""
    report = job.folder / "report"
    try:
        if read_json(report / RECORD) == {"how": _how(job, texts, processes)}:
            return Results.read(report)
    except UserError:  # missing or damaged
        pass
    return None


def _how(job: Job, texts: Texts, processes: int) -> str:
    """A checksum of all that the results depend on, and of the results themselves."""
    cfg, folder = job.cfg, job.folder
    files = [folder / "report" / FILE]
    for package in (Path(specdec.__path__[0]), Path(__file__).parent):
        files += sorted(package.rglob("*.py"))
    drafts_of = [folder / "best"]
    if cfg.also is not None:
        drafts_of.append(folder / f"with-{cfg.also}")
    how = {
        "settings": [cfg.name, asdict(cfg.decode), cfg.also, cfg.data.path, texts.measured],
        "prompts": [prompt.ids.tolist() for prompt in texts.prompts],
        "machine": asdict(machine_of(job.target.whole())),
        "processes": processes,
        "drafts": [drafts.digest(path) for path in drafts_of],
        "files": [of_file(path) for path in files if path.exists()],
    }
    return of_value(how)

"""Names on the Hugging Face hub: one question whether the hub answers, before anything is read from
it. Its client alone would ask for each file five more times, and wait for half a minute."""

import re
from functools import cache
from pathlib import Path
from threading import Thread

from huggingface_hub import constants, get_session
from huggingface_hub.file_download import repo_folder_name

from specdec.compat import read_hub_cache_alone
from specdec.errors import first_line, require
from specdec.progress import tell

SECONDS = 8.0  # in which the hub has to answer
NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def require_on_hub(setting: str, name: str, kind: str = "model") -> None:
    """If `name`, the value of a setting, is that of a `model` or a `dataset` on the hub, ask once
    whether the hub answers. If it does not, this process and those that it starts read the hub's
    cache alone. Raises UserError if the name is not in the cache either."""
    if not NAME.fullmatch(name) or Path(name).exists():
        return
    if reason := offline_reason():
        require(
            is_in_cache(name, kind),
            f"{setting}={name!r} is no file or folder here, not in the hub's cache "
            f"({constants.HF_HUB_CACHE}), and {constants.ENDPOINT} does not answer ({reason}): "
            "connect this machine or set HTTPS_PROXY or HF_ENDPOINT, or give a path",
        )


def is_in_cache(name: str, kind: str) -> bool:
    """Whether the hub's cache has files of a model or a dataset."""
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    if folder.is_dir() or kind != "dataset":
        return folder.is_dir()
    from datasets import config  # slow to import, seldom used

    return (Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()


@cache
def offline_reason() -> str:
    """The reason why the hub does not answer; empty if it does, or if the user set HF_HUB_OFFLINE.
    Asked once in a process; without an answer, the hub's cache alone is read from then on."""
    if constants.HF_HUB_OFFLINE:
        return ""
    said = [f"no answer in {SECONDS:g} seconds"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
            said.append("")
        except Exception as error:  # of the client's library, whose classes change
            said.append(first_line(error))

    # in a thread, as the client's own limit does not cover the look-up of the address
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SECONDS)
    if reason := said[-1]:
        read_hub_cache_alone()
        tell(f"{constants.ENDPOINT} does not answer ({reason}): only its cache here is read")
    return reason

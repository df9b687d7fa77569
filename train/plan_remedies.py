"""Settings with which a stage of a plan, or the complete run, fits. Each was tried in the table of
the plan (`stages_of`)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from specdec.errors import UserError, require
from train.planned_stages import Facts, stages_of
from train.run_config import Config

MOST_DEVICES = 64  # maximum number of devices in a remedy
ENGINES = ["http://localhost:8000/v1"]  # in remedies

Settings = Mapping[str, Any]  # values by key, such as {"loop.rows": 2}


def with_settings(cfg: Config, settings: Settings) -> Config:
    """The configuration with other values of these keys, as set on the command line. Raises
    UserError for contradictory values."""
    for key, value in settings.items():
        group, name = key.split(".")
        owner = replace(getattr(cfg, group), **{"engines" if name == "from" else name: value})
        cfg = replace(cfg, **{group: owner})
    cfg.check()
    require(
        not (cfg.target.tensor_parallel and cfg.target.device_map),
        "target.tensor_parallel and target.device_map exclude each other",
    )
    return cfg


def as_overrides(settings: Settings) -> str:
    """Settings as arguments of train.py."""
    texts = {key: x[0] if isinstance(x, list) else x for key, x in settings.items()}
    return " ".join(
        f"{key}={str(x).lower() if isinstance(x, bool) else x}" for key, x in texts.items()
    )


def remedies(cfg: Config, facts: Facts, name: str) -> list[Settings]:
    """Settings with which the stage of this name fits, and no other stage stops fitting: the least
    change of each kind, and none that contains the keys of another."""
    unfit = {stage.name for stage in stages_of(cfg, facts) if not stage.fits}

    def fits(settings: Settings) -> bool:
        try:
            stages = stages_of(with_settings(cfg, settings), facts)
        except UserError:  # they do not go with the others
            return False
        return {stage.name for stage in stages if not stage.fits} <= unfit - {name}

    fitted = list[Settings]()
    for kind in _candidates(cfg, facts, name):
        kind = [x for x in kind if not any(x.keys() >= known.keys() for known in fitted)]
        fitted += [settings for settings in kind if fits(settings)][:1]
    return fitted


def _candidates(cfg: Config, facts: Facts, name: str) -> Iterator[list[Settings]]:
    """Settings to try for a stage, by kind, the least change first. More devices are proposed only
    if they are GPUs."""
    n, rows, target = cfg.planning.devices, cfg.loop.rows, facts.target
    larger = [2**k for k in range(1, 10) if n < 2**k <= MOST_DEVICES and facts.device.gpu]

    def halves(key: str, value: int, least: int) -> list[Settings]:
        return [{key: value >> k} for k in range(1, 32) if value >> k >= least]

    def shorter() -> list[Settings]:
        """Shorter documents, with prompts and responses that have room in them."""
        lengths = halves("data.max_length", cfg.data.longest_document, 64)
        if cfg.data.responses != "target":
            return lengths
        prompt, new = cfg.data.longest_prompt, cfg.responses.longest_response
        return [
            {
                **length,
                "data.max_prompt": min(prompt, most // 2),
                "responses.max_new_tokens": min(new, most // 2),
            }
            for length in lengths
            for most in length.values()
        ]

    if name == "disk":
        yield [{"hidden_states.bits": 8}]
        if not cfg.trains_on_text_alone:
            yield [{"hidden_states.mode": "online"}]
        return
    smaller: list[Settings] = [{}]  # training steps that hold less, but read as many rows
    if name == "training":
        fewer: list[Settings] = [
            {"loop.rows": r, "loop.accumulate": cfg.loop.accumulate * rows // r}
            for r in range(rows - 1, 0, -1)
            if rows % r == 0
        ]
        chunks = halves("loss.chunk", cfg.loss.chunk, 32)
        yield fewer
        yield chunks
        yield [{**r, **c} for r in fewer for c in chunks]
        smaller += [{**r, **c} for r in fewer[-1:] or [{}] for c in chunks[-1:]]
        if not cfg.trains_on_text_alone:
            yield [{"hidden_states.mode": "offline", **s} for s in smaller]
        yield [{"planning.fsdp": True, **s} for s in smaller if n > 1]
        yield [{"planning.devices": m, "planning.fsdp": True, **s} for m in larger for s in smaller]
        yield [{**smaller[-1], **s} for s in shorter()]
    ways: list[Settings] = [{"target.tensor_parallel": True}, {"target.device_map": "auto"}]
    for way in [{}] if cfg.target.tensor_parallel or cfg.target.device_map else ways:
        divides = cfg.target.tensor_parallel or "target.tensor_parallel" in way
        counts = [m for m in (n, *larger) if m > 1 and (target.divides(m) or not divides)]
        yield [{**way, **s} for m in counts if m == n for s in smaller]
        part = target.most_processes(n) if divides else n  # of the devices
        if part is not None and part != n:
            yield [{"planning.devices": part, **way, **s} for s in smaller]
        yield [{"planning.devices": m, **way, **s} for m in counts if m > n for s in smaller]
    if name in ("responses", "hidden states"):
        if name == "responses":
            yield [{"responses.from": ENGINES}]
            yield halves("responses.max_new_tokens", cfg.responses.longest_response, 16)
        yield [{"hidden_states.from": ENGINES}]
        yield shorter()
    if name == "measuring":
        yield halves("decode.batch", cfg.decode.batch, 1)
        yield [{"decode.prompts": 0}]


def fitting_settings(cfg: Config, facts: Facts, more: bool = False) -> Settings | None:
    """Settings with which all stages fit, on `more` devices if given; None if there are none. They
    are found step by step: the remedy of a stage after which the fewest stages do not fit."""
    settings: Settings = {}
    while True:
        now = with_settings(cfg, settings)
        unfit = [stage.name for stage in stages_of(now, facts) if not stage.fits]
        if not unfit:
            return settings
        options = [{**settings, **option} for option in remedies(now, facts, unfit[0])]
        if not more:
            options = [x for x in options if x.get("planning.devices", 0) <= cfg.planning.devices]
        if not options:
            return None
        settings = min(options, key=lambda option: _unfit(with_settings(cfg, option), facts))


def _unfit(cfg: Config, facts: Facts) -> int:
    return sum(not stage.fits for stage in stages_of(cfg, facts))

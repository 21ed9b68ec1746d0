"""The first object of a store: what is trained there, and by which settings it began."""

import json

from fftgrad.exchanges import AllGather
from fftgrad.islands import _frame, _keys
from fftgrad.islands._model import Model
from fftgrad.islands._perform import StoreError
from fftgrad.islands._requests import Create, Read, Steps, settle
from fftgrad.islands._settings import Settings, read_settings


def enter(
    model: Model, mine: Settings, known: tuple[AllGather, ...]
) -> Steps[tuple[Settings, bytes]]:
    """The settings of the first round of a run of this model, and the run's bytes."""
    about = {"format": _frame.FORMAT, "model": model.described, "settings": mine.as_dict()}
    text = json.dumps(about, sort_keys=True, indent=1).encode()
    data = yield from settle(_keys.RUN, text)
    if (yield Create(_keys.RUN, data)):  # with its own bytes, so that nothing is lost by asking
        raise ValueError(
            "Island(store): must make an object only if there is none, got one that replaces "
            "run.json; take a server that honours If-None-Match, or another kind of store."
        )
    run = _frame.read_json(data)
    if run.get("format") != _frame.FORMAT:
        raise ValueError(
            f"Island(store): must be of format {_frame.FORMAT}, got a run of format "
            f"{run.get('format')!r}; take the fftgrad that wrote it, or another folder."
        )
    theirs = run.get("model")
    if theirs != model.described:
        differs = [row for row in model.described if row not in (theirs or ())]
        raise ValueError(
            "Island(store): must be the run of this model, got that of another, which has no "
            f"{differs[0] if differs else 'so few leaves'}; take another folder."
        )
    return read_settings(run.get("settings"), known), data


def stay(data: bytes) -> Steps[None]:
    """An error where the store is not that of the run any more: nothing may be written into it.

    A folder whose disk is not mounted is one, and would be begun anew by the first to write.
    """
    found = yield Read(_keys.RUN)
    if found != data:
        got = "none" if found is None else "that of another run"
        raise StoreError(
            f"store: must have the run.json of this run, got {got}; see whether its disk is "
            "mounted, and whether somebody removed it."
        )


def check_settings(mine: Settings | None, theirs: Settings) -> None:
    """Refuses settings that differ from those in force, and say that they are the same."""
    if mine and mine.version == theirs.version and mine != theirs:
        differ = [k for k, v in mine.as_dict().items() if theirs.as_dict()[k] != v]
        raise ValueError(
            f"Island(settings): must be those of the run, {theirs}, got another {differ[0]}; "
            f"propose others by version={theirs.version + 1}, or leave them out."
        )

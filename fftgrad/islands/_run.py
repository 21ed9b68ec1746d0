"""The first object of a store: what is trained there, and by which settings it began."""

import json

from fftgrad.exchanges import AllGather
from fftgrad.islands import _frame, _keys
from fftgrad.islands._model import Model
from fftgrad.islands._requests import Steps, settle
from fftgrad.islands._settings import Settings, read_settings


def enter(model: Model, asked: Settings | None, known: tuple[AllGather, ...]) -> Steps[Settings]:
    """The settings of the run's first round, once it is known to be one of this model."""
    mine = asked or Settings()
    about = {"format": _frame.FORMAT, "model": model.described, "settings": mine.as_dict()}
    text = json.dumps(about, sort_keys=True, indent=1).encode()
    run = _frame.read_json((yield from settle(_keys.RUN, text)))
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
    return read_settings(run.get("settings"), known)


def check_settings(mine: Settings | None, theirs: Settings) -> None:
    """Refuses settings that differ from those in force, and say that they are the same."""
    if mine and mine.version == theirs.version and mine != theirs:
        differ = [k for k, v in mine.as_dict().items() if theirs.as_dict()[k] != v]
        raise ValueError(
            f"Island(settings): must be those of the run, {theirs}, got another {differ[0]}; "
            f"propose others by version={theirs.version + 1}, or leave them out."
        )

"""The first object of a store: which run it is, what is trained, and by which settings."""

from typing import Any

from fftgrad.islands import _frame, _keys
from fftgrad.islands._frame import DamagedError
from fftgrad.islands._model import Model
from fftgrad.islands._perform import StoreError
from fftgrad.islands._requests import Create, Read, Steps, settle
from fftgrad.islands._settings import Settings, read_settings


def enter(model: Model, mine: Settings | None, own: str) -> Steps[tuple[Settings, bytes]]:
    """The settings of a run of this model, and the run's bytes.

    One that begins here is called `own`. A store that was emptied and begun anew has another.
    """
    asked = mine or Settings()
    about = {"id": own, "model": model.described, "settings": asked.as_dict()}
    try:
        data = yield from settle(_keys.RUN, _frame.pack_json(about), _frame.MOST_TEXT)
        if (yield Create(_keys.RUN, data)):  # with its own bytes, so that nothing is lost by asking
            raise ValueError(
                "Island(store): must make an object only if there is none, got one that replaces "
                "run.json; take a server that honours If-None-Match, or another kind of store."
            )
        run = read(data, "Island(store)")
    except DamagedError as error:
        raise ValueError(
            f"Island(store): must have a {_keys.RUN} that is whole, got one that is {error}; put "
            "back what it was, or take another folder."
        ) from None
    theirs = run.get("model")
    if theirs != model.described:
        differs = [row for row in model.described if row not in (theirs or ())]
        raise ValueError(
            "Island(store): must be the run of this model, got that of another, which has no "
            f"{differs[0] if differs else 'so few leaves'}; take another folder."
        )
    settings = read_settings(run.get("settings"), asked.exchange)
    if mine and mine != settings:
        differ = [k for k, v in mine.as_dict().items() if settings.as_dict()[k] != v]
        raise ValueError(
            f"Island(settings): must be those of the run, {settings}, got another {differ[0]}; "
            "leave them out, or begin a run in another folder."
        )
    return settings, data


def read(data: bytes, owner: str) -> dict[str, Any]:
    """What the object says; an error if it is of another format."""
    version = _frame.read_json(data).get("format")
    if version != _frame.FORMAT:
        raise ValueError(
            f"{owner}: must be of format {_frame.FORMAT}, got a run of format {version!r}; take "
            "the fftgrad that wrote it, or another folder."
        )
    return _frame.unpack_json(data)


def stay(data: bytes) -> Steps[str]:
    """What is wrong with the object of a run, in which an island may go on all the same.

    An error where the store is not that of the run any more: nothing may be written into it. A
    folder whose disk is not mounted is one, and would be begun anew by the first to write.
    """
    try:
        found = yield Read(_keys.RUN, _frame.MOST_TEXT)
        if found == data:
            return ""
        if found is not None:
            _frame.unpack_json(found)  # before its format, which may be what is damaged
    except DamagedError as error:
        return f"{_keys.RUN} is damaged ({error}), and nobody can join; put back what it was"
    got = "none" if found is None else "that of another run"
    raise StoreError(
        f"store: must have the {_keys.RUN} of this run, got {got}; see whether its disk is "
        "mounted, and whether somebody removed it."
    )

"""Facts that all islands share: the model and the settings in run.json, and owners of names."""

from fftgrad._values import check, check_count, check_kind, check_within, value
from fftgrad.exchanges import AllGather
from fftgrad.islands import _objects
from fftgrad.islands._model import Model
from fftgrad.islands._objects import RUN, DamagedError, Who
from fftgrad.islands._store import Create, List, Read, Steps, StoreError, settle
from fftgrad.optimizers._diloco import SPARSE


@value
class Settings:
    """Value: settings of a run, the same on all islands. The first island writes them to the store.

    To use other settings, begin a run in a new folder with `island.params`.

    Args:
      exchange: `fg.AllGather` with a codec or a rule. With `clip_to_median=True`, decoded vectors
        are clipped to the median norm of the round. The store keeps the `repr` of the exchange.
      sync_every: H, the inner steps between two contributions of an island.
      rate: learning rate of the outer optimizer.
      islands: number of islands for which the first round waits.
      deadline: seconds until a round closes, counted from the moment at which an island that has
        contributed sees an expected contribution. Inner steps may take longer.
      stale: maximum number of rounds since the parameters from which a contribution started.
      limit: maximum norm and weight of a contribution, as multiples of the median in its round.
      anchors: number of rounds from one stored anchor to the next.

    Example:
      >>> fg.islands.Settings(sync_every=30, islands=3)
      Settings(sync_every=30, islands=3)
    """

    exchange: AllGather = SPARSE
    sync_every: int = 50
    rate: float = 0.7
    islands: int = 1
    deadline: float = 60.0
    stale: int = 2
    limit: float = 10.0
    anchors: int = 10

    def __post_init__(self) -> None:
        check_kind("Settings(exchange)", self.exchange, AllGather, "use fg.AllGather(codec).")
        for name in ("sync_every", "islands", "anchors"):
            check_count(f"Settings({name})", getattr(self, name), "use 10.")
        check_count("Settings(stale)", self.stale, "use 1.", least=0)
        check_within("Settings(rate)", self.rate, "(0, inf)", "use 0.7.")
        check_within("Settings(deadline)", self.deadline, "(0, 604800]", "use 60.0.")
        check_within("Settings(limit)", self.limit, "[1, inf)", "use 10.0.")


def enter_run(model: Model, settings: Settings, own: str) -> Steps[bytes]:
    """Begin or join the run of a store; return the bytes of run.json.

    A new run gets the id `own`, which no earlier run in the same store has.
    """
    mine = vars(settings) | {"exchange": repr(settings.exchange)}
    about = {"id": own, "model": model.described, "settings": mine}
    try:
        data = yield from settle(RUN, _objects.pack_json(about))
        is_new = yield Create(RUN, data)  # the same bytes, in case the server replaces them
        got, remedy = "a store that replaces run.json", "use a server with If-None-Match."
        check(not is_new, "Island(store)", "keep existing objects", got, remedy)
        _objects.check_format(_objects.read_json(data), "a run")
        run = _objects.unpack_json(data)
    except DamagedError as error:
        raise ValueError(
            f"Island(store): must have an intact {RUN}, got damage ({error}); repair it, or "
            "use another folder."
        ) from None
    rule = f"have the {len(run['model'])} leaves of the run"
    odd = [row for row in model.described if row not in run["model"]][:4]
    found = f"{len(model.leaves)}, of which the run lacks {odd}"
    same = run["model"] == model.described
    check(same, "Island(params)", rule, found, "use another folder.")
    same, rule = run["settings"] == mine, f"be those of the run, {run['settings']}"
    check(same, "Island(settings)", rule, mine, "pass the same, or use another folder.")
    return data


def check_run(data: bytes) -> Steps[str]:
    """Return the damage of run.json, or "" if it is intact. Damage does not stop an island.

    If run.json is missing or belongs to another run, raise an error before the island writes. For
    example, the disk may be unmounted.
    """
    found = yield Read(RUN)
    if found == data:
        return ""
    try:
        if found is not None:
            _objects.unpack_json(found)
    except DamagedError as error:
        return f"{RUN} is damaged ({error}), so no island can join; repair it"
    got = "none" if found is None else "that of another run"
    raise StoreError(
        f"store: must have the {RUN} of this run, got {got}; check whether its disk is mounted."
    )


def claim_name(name: str) -> Steps[Who]:
    """Claim the name of an island for a new start, and take it from earlier starts."""
    number = max((yield from _starts(name)), default=0) + 1
    while not (yield Create(_objects.claim_key(Who(name, number)), b"")):
        number += 1
    return Who(name, number)


def check_name(who: Who) -> Steps[None]:
    """Refuse to continue under a name that a later start has claimed."""
    newest = max((yield from _starts(who.island)), default=0)
    got = f"{who.island!r}, which start {newest} took over from start {who.incarnation}"
    rule = "belong to one program at a time"
    check(newest <= who.incarnation, "Island(name)", rule, got, "use another name.")


def _starts(name: str) -> Steps[list[int]]:
    keys = yield List(_objects.claims(name))
    return [int(key.removeprefix(_objects.claims(name))) for key in keys]

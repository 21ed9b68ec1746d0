"""An island: the class that a training program calls, and the thread that works beside it."""

import math
import queue
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from fftgrad._contracts import PyTree
from fftgrad._values import check_count, check_kind, check_within
from fftgrad.islands._member import Member
from fftgrad.islands._model import Model, Outer, Tree, blended, check_finite
from fftgrad.islands._residual import Change, Outcome, Residual
from fftgrad.islands._run import Settings
from fftgrad.islands._store import Performer, Steps, Store, StoreError, open_store
from fftgrad.memories import ErrorFeedback

PATIENCE = 1.25
"""Deadlines for which a step waits: one of the round, and the time to close it."""
OVERDUE = 3
"""Deadlines after a meeting until a step waits for it."""
WEIGHTS = "[1e-6, 1e12]"
"""The weights of a step, of which the sum over a round stays in the bounds of a contribution."""


class Island:
    """Function: join a run whose islands share a store and nothing else, and train in it.

    An island is any JAX program: one process or many, on its own mesh. It trains on its own, and
    every H steps hands in its change, compressed. With the common parameters θ̄,

        θ̄ ← θ̄ + outer(Σ share · C(θ̄ - θ)),   θ ← mixing · θ + (1 - mixing) · θ̄.

    This is `fg.optimizers.diloco` without a common program. An island that dies is missed once, at
    the deadline of a round, and may come back under its name. The others go on.

        with fg.islands.Island("s3://bucket/run", "site-1", params, overlap_steps=5) as island:
            params = island.params
            for batch in batches:
                params, state, loss = train(params, state, batch)
                params = island.step(params, weight=batch.size, loss=loss)

    A thread writes, lists, reads and decodes while the next steps run. A step waits for it in two
    cases: at a meeting if `overlap_steps` is 0, and once the deadlines of three rounds have passed
    since the last meeting. It waits for a deadline and a quarter at most, and then trains on alone.

    Args:
      store: a URL, as for `open_store`, or the store that it returns.
      name: of the island. The newest start has the name; an earlier one ends at its next meeting.
      params: float32, bfloat16 or float16 arrays. The first island begins the run with its own.
        Shapes, dtypes and paths have to be the same on all.
      settings: of the run, the same on all.
      outer: a function from the rate of the settings to the optimizer of the common parameters, the
        same on all. With error feedback of a sparse codec, `fg.islands.nesterov` diverged.
      memory: error feedback, which keeps the part of a change that is not sent.
      overlap_steps: τ, inner steps between a meeting and its effect, below H.
      mixing: α, the share of its own parameters that an island keeps at a meeting.
      residual: `island.residual` of an earlier start, so that nothing of it is lost. The manifests
        say whether its last contribution counted. If it is too old it is left out, with a warning.

    Shapes: the common parameters are float32, whatever the dtype of the island's.

    Wire: a contribution is `fg.wire_bytes(exchange, params)` + 12 bytes for each part, and a header
      of some 200. In each round an island writes one, and reads those of the others.

    Claims: all islands hold the same bits after a round. They decode the same contributions in the
      order of the manifest, by the same program on one CPU device. The bits depend on jaxlib and
      the instruction set. An island with other bits is found at its next contribution, which has a
      digest, and takes the next anchor of the store. For a memory with decay 1, the changes that
      the manifests counted of an island + its residual = the changes that it handed in, to float32
      rounding. Late contributions return to the residual. Refused contributions are lost, and so is
      the residual of an island that died without a checkpoint. A crash at any instant leaves the
      old round or the new one.

    Raises:
      ValueError: if the store has a run of another model, format, outer optimizer or settings.
      ConnectionError: if the store cannot be read or written.

    Example:
      >>> settings = fg.islands.Settings(fg.AllGather(fg.Identity()), sync_every=1, rate=1.0)
      >>> with fg.islands.Island("memory://", "a", jnp.zeros(2), settings=settings) as island:
      ...     island.step(island.params + 1.0)
      Array([1., 1.], dtype=float32)
    """

    def __init__(
        self,
        store: str | Store,
        name: str,
        params: PyTree,
        *,
        settings: Settings = Settings(),
        outer: Outer = optax.sgd,
        memory: ErrorFeedback = ErrorFeedback(),
        overlap_steps: int = 0,
        mixing: float = 0.0,
        residual: Residual | None = None,
    ) -> None:
        check_kind("Island(settings)", settings, Settings, "use fg.islands.Settings().")
        check_kind("Island(memory)", memory, ErrorFeedback, "use fg.ErrorFeedback().")
        check_count("Island(overlap_steps)", overlap_steps, "use 1.", least=0)
        check_within("Island(mixing)", mixing, "[0, 1)", "use 0.5.")
        if overlap_steps >= settings.sync_every:
            raise ValueError(
                f"Island(overlap_steps): must be below sync_every={settings.sync_every} of the "
                f"settings, got {overlap_steps}; use 1."
            )
        self.settings = settings
        self._overlap_steps, self._mixing = overlap_steps, mixing
        self._model = Model.of(params)
        host = self._model.to_host(params)
        check_finite(host)
        self._is_closed = False
        self._courier: Courier | None = None

        def member() -> Member:
            return Member(
                name, self._model, outer=outer, memory=memory, settings=settings, residual=residual
            )

        _first_says(lambda: self._join(store, member(), host))
        self._steps, self._weight = 0, 0.0
        self._losses: list[Any] = []
        self._sent: tuple[int, float] | None = None  # at which step, and when
        self._last = 0  # step of the last meeting
        self._take_anchor(host)
        self.params: PyTree = self._model.to_params(self._start, params)

    def _join(self, store: str | Store, member: Member, host: Tree) -> bool:
        courier = Courier(member, open_store(store) if isinstance(store, str) else store)
        courier.start(member.start(host))
        self._courier = courier
        return True

    def step(
        self,
        params: PyTree,
        *,
        weight: jax.Array | float = 1.0,
        loss: jax.Array | float | None = None,
    ) -> PyTree:
        """Return the parameters for the next inner step: `params`, except after a round.

        Args:
          params: the parameters after this step. They may be donated to the next one.
          weight: of the step in the mean of all islands, such as its tokens. The weights of a round
            add up.
          loss: of the step, for the status of the run. It is read at the meeting.

        Raises:
          ValueError: if another start of the island has taken its name.
          RuntimeError: after `close`. If the store does not answer, nothing is raised: the island
            trains on alone, and `trouble` says why.
        """
        weight = float(weight)
        check_within("Island.step(weight)", weight, WEIGHTS, "pass the tokens of the step.")
        if self._is_closed:
            raise RuntimeError("Island.step: must come before close(), got one after it.")
        self._model.check(params)
        self._steps += 1
        self._weight += weight
        if loss is not None:
            self._losses.append(loss)
        if self._sent is None and self._steps - self._last >= self.settings.sync_every:
            self._meet(params)
        is_due = self._sent is not None and self._steps - self._sent[0] >= self._overlap_steps
        return self._rejoin(params) if is_due and self._is_done(self._patience()) else params

    def _is_done(self, seconds: float) -> bool:
        """Wait so many seconds at most; return whether nothing is under way, on all processes."""
        return _first_says(lambda: self._courier is None or self._courier.wait(seconds))

    def _patience(self) -> float:
        """Seconds for which this step may wait."""
        if self._sent is None or self._courier is None:
            return 0.0
        at, when = self._sent
        deadline = self.settings.deadline
        is_meeting = not self._overlap_steps and self._steps == at
        is_overdue = time.monotonic() - when > OVERDUE * deadline
        if is_meeting or (is_overdue and (self._steps - at) % self.settings.sync_every == 0):
            return self._longest()
        return 0.0

    def _longest(self) -> float:
        """The longest wait for the others, in seconds."""
        return PATIENCE * self.settings.deadline if self._courier else 0.0

    def _meet(self, params: PyTree) -> None:
        own = self._model.to_host(params)
        losses = [float(loss) for loss in jax.device_get(self._losses)]
        mean = float(np.mean(losses)) if losses else math.nan
        if self._courier is not None:
            tree = {path: self._start[path] - own[path] for path in own}
            loss = mean if math.isfinite(mean) else None
            self._courier.send(Change(tree, self._base, self._weight, loss))
        self._sent = self._steps, time.monotonic()
        self._last, self._weight = self._steps, 0.0
        self._losses.clear()

    def _rejoin(self, params: PyTree) -> PyTree:
        self._sent = None
        self._take_anchor(self._start)
        joined = self._start
        if self._mixing:
            joined = blended(self._model.to_host(params), joined, self._mixing)
        return self._model.to_params(joined, params)

    def _take_anchor(self, like: Tree) -> None:
        """Count the next change from the common parameters of now."""
        known = (like, np.int64(0))
        if self._courier is not None:
            known = (self._member.anchor.params, np.int64(self._member.anchor.round))
        tree, base = _share(known)
        self._start = self._model.as_held(tree)
        self._base = int(base)

    @property
    def _member(self) -> Member:
        assert self._courier is not None, "Island: only its first process knows that."
        return self._courier.member

    @property
    def round(self) -> int:
        """The round that is open for the island: its parameters are from before it."""
        return self._base

    @property
    def digest(self) -> str:
        """Digest of the common parameters, equal on islands with equal bits.

        Only the first process of an island has it, and all that follows.
        """
        return self._member.anchor.digest

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcome of each contribution."""
        return tuple(self._member.ledger.outcomes)

    @property
    def traffic(self) -> dict[str, int]:
        """Requests by kind, and bytes in both directions, since the island started."""
        return dict(self._courier.performer.traffic) if self._courier else {}

    @property
    def trouble(self) -> str:
        """The reason why the store was not reached, or why nothing of this island counts."""
        return self._courier.trouble if self._courier else ""

    @property
    def residual(self) -> Residual:
        """The changes that the island has not sent yet, for its checkpoint."""
        return self._member.ledger.saved(self._member.who, self._member.sent, self._member.run)

    def finish(self, params: PyTree | None = None) -> PyTree:
        """Return the common parameters at the end. It waits as `step` does.

        Args:
          params: the parameters after the last step, to hand in the change since the last meeting.
            Without them that change is left out, and so it is if that meeting is not over in time.
        """
        if params is not None and self._sent is not None and self._is_done(self._longest()):
            params = self._rejoin(params)
        if params is not None and self._sent is None and self._steps > self._last:
            self._model.check(params)
            self._meet(params)
        if self._sent is not None:
            self._is_done(self._longest())
        self._sent = None
        self._take_anchor(self._start)
        return self._model.to_params(self._start, self.params)

    def close(self) -> None:
        """Leave the run. The others wait for the island once, until the deadline of a round."""
        self._is_closed = True
        if self._courier is not None:
            self._courier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


NO, YES, FAILED = range(3)


def _first_says(ask: Callable[[], bool]) -> bool:
    """The answer of the island's first process, on all of its processes; if it fails, all do.

    Only the first process talks to the store.
    """
    told, failure = NO, None
    if jax.process_index() == 0:
        try:
            told = YES if ask() else NO
        except Exception as error:
            told, failure = FAILED, error
    if jax.process_count() > 1:
        told = int(multihost_utils.broadcast_one_to_all(np.int32(told)))
    if told == FAILED:
        raise failure or RuntimeError("Island: the first process of it failed.")
    return told == YES


def _share(tree: PyTree) -> PyTree:
    """A tree of arrays of the first process, on all processes of the island."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


PAUSE = 5.0
"""Seconds between tries while the store does not answer, after the retries of one request."""


class _Closed(Exception):  # noqa: N818 (no error: it ends a wait)
    """The island was closed meanwhile."""


class Courier:
    """The thread that hands in the changes of an island, one at a time.

    While a change is under way, the member belongs to the thread, and else to the program. No lock
    is held while either computes.
    """

    def __init__(self, member: Member, store: Store) -> None:
        self.member = member
        self.performer = Performer(store, wait=self._wait)
        self._told = ""  # trouble that the program was warned of
        self._unreached = ""  # of the last try, while the store does not answer
        self._error: BaseException | None = None
        self._jobs: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._idle, self._closing = threading.Event(), threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._work, name="fftgrad-island", daemon=True)

    @property
    def trouble(self) -> str:
        """The reason why the store was not reached, or why nothing of the island counts."""
        return self._unreached or self.member.trouble

    def start(self, steps: Steps[Any]) -> None:
        """Run the first steps in the program, which gets their errors, and start the thread."""
        self.performer.run(steps)
        self._thread.start()

    def send(self, change: Change) -> None:
        """Hand in a change."""
        self.member.sent = change
        self._idle.clear()
        self._jobs.put(change)

    def wait(self, seconds: float) -> bool:
        """Wait so many seconds at most; return whether nothing is under way."""
        done = self._idle.wait(seconds)
        if self._error is not None:
            raise self._error
        if (trouble := self.member.trouble) and trouble != self._told:
            self._told = trouble
            warnings.warn(f"Island: {trouble}.", UserWarning, stacklevel=6)
        return done

    def close(self) -> None:
        """End the thread, even where it waits."""
        self._closing.set()
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # for the program, which waits for it
            self._fail(error)

    def _serve(self) -> None:
        while not self._closing.is_set():
            change = self._jobs.get()
            if change is not None:
                while not self._try(self.member.hand_in, change) and not self._closing.is_set():
                    self._closing.wait(PAUSE)
            self._idle.set()

    def _try(self, steps: Any, *args: Any) -> bool:
        """Run steps; return False if the store does not answer, so that they are tried again."""
        try:
            self.performer.run(steps(*args))
            self._unreached = ""
        except StoreError as error:
            self._unreached = str(error)
            return False
        except _Closed:
            return True
        except BaseException as error:  # for the program, at its next step
            self._fail(error)
        return True

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._closing.set()
        self._idle.set()

    def _wait(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise _Closed

"""`Island`, the class that a training program calls, and its background thread."""

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
"""Longest wait of a step, as a multiple of the deadline: 1 for the round, 0.25 to close it."""
OVERDUE = 3
"""Multiple of the deadline after which a step waits for the end of a round."""
WEIGHTS = "[1e-6, 1e12]"
"""Range of a step's weight. The sum over the steps must fit the bounds of a contribution."""


class Island:
    """Function: join a run whose islands share only an object store, and train in it.

    An island is a JAX program of one or more processes with its own mesh. All islands have the same
    common parameters θ̄. After every H inner steps, an island with parameters θ contributes
    C(θ̄ - θ) to a round, with C its codec. At the end of the round,

        θ̄ ← θ̄ + outer(Σ share · C(θ̄ - θ)),   θ ← mixing · θ + (1 - mixing) · θ̄.

    The shares of the contributions are their weights divided by the sum of all weights. This is the
    algorithm of `fg.optimizers.diloco`. If an island crashes, the others wait for it in one round,
    until the deadline. The crashed island can rejoin under its name.

        with fg.islands.Island("s3://bucket/run", "site-1", params, overlap_steps=5) as island:
            params = island.params
            for batch in batches:
                params, state, loss = train(params, state, batch)
                params = island.step(params, weight=batch.size, loss=loss)

    A background thread sends, reads and decodes contributions while the next steps run. A step
    waits for this thread if `overlap_steps` is 0 and the step contributes, or if a round takes over
    3 times `settings.deadline`. It waits for at most 1.25 deadlines, and the island continues
    alone.

    Args:
      store: a URL, as for `open_store`, or the store that `open_store` returns.
      name: name of the island. If a second program starts under the name, the first one raises an
        error at its next contribution.
      params: float32, bfloat16 or float16 arrays, with the same paths, shapes and dtypes on all
        islands. The run begins with the parameters of the first island.
      settings: settings of the run, the same on all islands.
      outer: a function from `settings.rate` to the optimizer of the common parameters, the same on
        all islands. With a sparse codec and error feedback, `fg.islands.nesterov` diverged.
      memory: error feedback, which keeps the unsent part of a change.
      overlap_steps: minimum number of inner steps from a contribution to the new θ̄, below H.
      mixing: the share of the island's own θ in its parameters after a round, in [0, 1).
      residual: `island.residual` of an earlier start under this name. If a later
        contribution of this island was counted, the residual is outdated: the island warns and
        starts without it.

    Shapes: the common parameters are float32 for all dtypes of `params`.

    Wire: a contribution has `fg.wire_bytes(exchange, params)` bytes, 12 bytes for each part, and a
      header of about 200 bytes. In each round, an island writes its own contribution and reads the
      contributions of the others.

    Claims: θ̄ has the same bits on all islands, because each island adds the contributions in the
      order of the manifest, by the same program on one CPU device. The bits depend on jaxlib and
      the instruction set. A digest in each contribution detects an island with other bits, which
      must load the next stored θ̄ (an anchor). If the memory has decay 1, then for each island,
      counted changes + residual = contributed changes, up to float32 rounding. Late contributions
      return to the residual. Refused contributions are lost. If an island crashes without a
      checkpoint, its residual is lost too. After a crash at any instant, the round is either open,
      with the old θ̄, or closed, with the new.

    Raises:
      ValueError: if the run has another model, format or outer optimizer, or other settings.
      ConnectionError: if the store cannot be read or written.

    Example:
      >>> settings = fg.islands.Settings(fg.AllGather(fg.codecs.Identity()), sync_every=1, rate=1.0)
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
        most = settings.sync_every - 1
        check_count("Island(overlap_steps)", overlap_steps, "stay below sync_every.", 0, most)
        check_within("Island(mixing)", mixing, "[0, 1)", "use 0.5.")
        self.settings = settings
        self._overlap_steps, self._mixing = overlap_steps, mixing
        self._model = Model.of(params)
        host = self._model.to_host(params)
        check_finite(host)
        self._is_closed = False
        self._courier: Courier | None = None

        def join() -> bool:
            member = Member(
                name, self._model, outer=outer, memory=memory, settings=settings, residual=residual
            )
            courier = Courier(member, open_store(store) if isinstance(store, str) else store)
            courier.start(member.start(host))
            self._courier = courier
            return True

        _first_says(join)
        self._steps, self._weight = 0, 0.0
        self._losses: list[Any] = []
        self._sent: tuple[int, float] | None = None  # step and time of a contribution in flight
        self._last = 0  # step of the last contribution
        self._take_anchor(host)
        self.params: PyTree = self._model.to_params(self._start, params)

    def step(
        self,
        params: PyTree,
        *,
        weight: jax.Array | float = 1.0,
        loss: jax.Array | float | None = None,
    ) -> PyTree:
        """Return the parameters for the next inner step: `params`, except after a round.

        If the store does not answer, the island continues alone, and `trouble` gives the reason.

        Args:
          params: the parameters after this step. The next step may donate them.
          weight: weight of the step in the mean of all islands, such as its number of tokens. The
            weight of a contribution is the sum of its steps' weights.
          loss: loss of the step, for `status`. The host reads it when the island contributes.

        Raises:
          ValueError: if a later start has claimed the name of the island.
          RuntimeError: after `close`.
        """
        weight = float(weight)
        check_within("Island.step(weight)", weight, WEIGHTS, "pass the tokens of the step.")
        if self._is_closed:
            raise RuntimeError("Island.step: must come before close().")
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
        """Wait at most this many seconds for the thread; return True on all processes if idle."""
        return _first_says(lambda: self._courier is None or self._courier.wait(seconds))

    def _patience(self) -> float:
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
        """Start the next change from the current common parameters."""
        known = (like, np.int64(0))
        if self._courier is not None:
            known = (self._member.anchor.params, np.int64(self._member.anchor.round))
        if jax.process_count() > 1:
            known = jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(known))
        tree, base = known
        self._start = self._model.as_held(tree)
        self._base = int(base)

    @property
    def _member(self) -> Member:
        assert self._courier is not None, "Island: only the first process has this property."
        return self._courier.member

    @property
    def round(self) -> int:
        """Number of the round whose anchor the island's inner steps started from."""
        return self._base

    @property
    def digest(self) -> str:
        """Digest of the common parameters, equal on islands with equal bits.

        `digest`, `outcomes` and `residual` need the first process of an island.
        """
        return self._member.anchor.digest

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Outcomes of all contributions since the start of the island."""
        return tuple(self._member.ledger.outcomes)

    @property
    def traffic(self) -> dict[str, int]:
        """Requests by kind, and bytes in both directions, since the start of the island."""
        return dict(self._courier.performer.traffic) if self._courier else {}

    @property
    def trouble(self) -> str:
        """Reason why the store does not answer or contributions do not count; else empty."""
        return self._courier.trouble if self._courier else ""

    @property
    def residual(self) -> Residual:
        """Unsent changes of the island, for its checkpoint."""
        return self._member.ledger.saved(self._member.who, self._member.sent, self._member.run)

    def finish(self, params: PyTree | None = None) -> PyTree:
        """Wait for open rounds, each at most 1.25 times the deadline; return the common parameters.

        Args:
          params: the parameters after the last step. With them, the island contributes its last
            change, unless an earlier contribution is still in flight after the wait.
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
        """Leave the run. The others wait for this island in one round, until the deadline."""
        self._is_closed = True
        if self._courier is not None:
            self._courier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


NO, YES, FAILED = range(3)


def _first_says(ask: Callable[[], bool]) -> bool:
    """Return the answer of `ask` on all processes. Only the first process, with the store, asks.

    If `ask` fails, all processes raise an error.
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
        raise failure or RuntimeError("Island: the first process failed; see its error.")
    return told == YES


PAUSE = 5.0
"""Seconds between attempts while the store does not answer, after the retries of a request."""


class _Closed(Exception):  # noqa: N818 (ends a wait, and is not an error)
    """The island was closed during a wait."""


class Courier:
    """Background thread that contributes the changes of an island, one at a time.

    While the thread contributes a change, only the thread modifies the member. Otherwise, only the
    program does. So no lock is needed.
    """

    def __init__(self, member: Member, store: Store) -> None:
        self.member = member
        self.performer = Performer(store, wait=self._wait)
        self._told = ""  # trouble of the last warning
        self._unreached = ""  # error of the last attempt, while the store does not answer
        self._error: BaseException | None = None
        self._jobs: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._idle, self._closing = threading.Event(), threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._work, name="fftgrad-island", daemon=True)

    @property
    def trouble(self) -> str:
        """Reason why the store does not answer or contributions do not count; else empty."""
        return self._unreached or self.member.trouble

    def start(self, steps: Steps[Any]) -> None:
        """Join the run, raising errors in the program, and then start the thread."""
        self.performer.run(steps)
        self._thread.start()

    def send(self, change: Change) -> None:
        self.member.sent = change
        self._idle.clear()
        self._jobs.put(change)

    def wait(self, seconds: float) -> bool:
        """Wait at most this many seconds for the thread; return True if the thread is idle."""
        done = self._idle.wait(seconds)
        if self._error is not None:
            raise self._error
        if (trouble := self.member.trouble) and trouble != self._told:
            self._told = trouble
            warnings.warn(f"Island: {trouble}.", UserWarning, stacklevel=6)
        return done

    def close(self) -> None:
        self._closing.set()
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while not self._closing.is_set() and (change := self._jobs.get()) is not None:
                while not self._try(change):
                    self._wait(PAUSE)
                self._idle.set()
        except _Closed:
            pass
        except BaseException as error:  # raised in the program at its next step
            self._error = error
            self._closing.set()
        self._idle.set()

    def _try(self, change: Change) -> bool:
        """Contribute a change; return False if the store does not answer."""
        try:
            self.performer.run(self.member.hand_in(change))
        except StoreError as error:
            self._unreached = str(error)
            return False
        self._unreached = ""
        return True

    def _wait(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise _Closed

"""What compressing did to training: a class of warning for each method, from measured runs."""

from typing import Literal, NamedTuple

Loss = Literal["as dense", "close", "check", "worse", "not measured"]
"""What to expect of the loss, from short runs of small models: yours may differ."""


class Seen(NamedTuple):
    """What came of 200 steps with a method, beside dense's, in `benchmarks/convergence`."""

    loss: float  # of a language model, in per cent above dense's
    accuracy: float  # of a network on digits, in points below dense's
    # as `loss`, after 2,000 steps, or else 400; None if there was no such run
    later: float | None = None
    steps = 1.0

    @property
    def kind(self) -> Loss:
        """As dense within 1 % and half a point, close within 3 % and one, to check within 8 %."""
        loss = self.loss if self.later is None else max(self.loss, self.later)
        if loss <= 1 and self.accuracy <= 0.5:
            return "as dense"
        if loss <= 3 and self.accuracy <= 1:
            return "close"
        return "check" if loss <= 8 and self.accuracy <= 2 else "worse"


class Longer(NamedTuple):
    """How many times dense's steps a method took to dense's loss, in `benchmarks/slow_network`."""

    steps: float

    @property
    def kind(self) -> Loss:
        """Close within a fifth more, to check within a half more."""
        return "close" if self.steps <= 1.2 else "check" if self.steps <= 1.5 else "worse"


SEEN: dict[str, Seen | Longer] = {
    "dense float32": Seen(0.0, 0.0, 0.0),
    "dense bfloat16": Seen(-0.1, 0.0),
    "QSGD 4 bits": Seen(0.4, -0.3),
    "TernGrad, shared scale": Seen(1.3, 0.0),
    "EDEN 1 bit (DRIVE)": Seen(0.7, 0.0, 2.7),
    "random-k 10 %": Seen(-0.3, 0.1),
    "PowerSGD rank 4": Seen(0.2, 0.7, 1.1),
    "ACP-SGD rank 4": Seen(2.3, 0.3),
    "shared top-k 4 %": Seen(1.4, 0.6),
    "top-k 4 %, 4 bits": Seen(-0.9, 0.3, 2.6),
    "top-k 1 %, 3 bits": Seen(1.7, 0.4, 9.3),
    "DCT 64, 4 %, 4 bits": Seen(-2.0, 0.6, 0.5),
    "DCT 64, budget 100x, no decay": Seen(-2.3, 0.0, -1.7),
    "budget 300x": Seen(1.6, 0.6, 8.0),
    "two stages, top-k 4 %, 4 bits": Seen(0.4, 0.1, 5.4),
    "signs, two stages": Longer(1.4),
    "2 bits, two stages": Longer(1.13),
    "4 local steps, signs": Longer(1.2),
    "8 local steps, signs": Longer(1.33),
}
"""Of each candidate: two seeds, after 2,000 steps one; `Longer` over links of 100 Mbit/s."""

"""What compressing did to training: a class of warning for each method, from measured runs."""

from typing import Literal, NamedTuple

Loss = Literal["as dense", "close", "check", "worse", "not measured"]
"""What to expect of the loss, from runs of small models: yours may differ."""


class HeldOut(NamedTuple):
    """The loss after 1,000 steps, in per cent above the better of dense Adam and dense Muon.

    Of four tasks that no setting was chosen on, with 8 workers: `benchmarks/held_out.py`. Two
    seeds; of two stages and the eigenbasis one or two.
    """

    mean: float  # over the tasks
    worst: float  # of them
    steps = 1.0

    @property
    def kind(self) -> Loss:
        """As dense within 1 %, close within 3 %, to check within 8 %, in the mean of the tasks."""
        if self.mean <= 1:
            return "as dense"
        return "close" if self.mean <= 3 else "check" if self.mean <= 8 else "worse"


class Tuned(NamedTuple):
    """What came of 200 steps beside dense's, on the tasks that settings were chosen on.

    That does not travel to other models, so none is better than to be checked.
    """

    loss: float  # of a language model, in per cent above dense's
    accuracy: float  # of a network on digits, in points below dense's
    # as `loss`, after 2,000 steps, or else 400; None if there was no such run
    later: float | None = None
    steps = 1.0

    @property
    def kind(self) -> Loss:
        """To check within 8 % and two points."""
        loss = self.loss if self.later is None else max(self.loss, self.later)
        return "check" if loss <= 8 and self.accuracy <= 2 else "worse"


class Longer(NamedTuple):
    """How many times dense's steps a method took to dense's loss, in `benchmarks/slow_network`."""

    steps: float

    @property
    def kind(self) -> Loss:
        """To check within a half more: the model and its rate are those that settings met."""
        return "check" if self.steps <= 1.5 else "worse"


SEEN: dict[str, HeldOut | Tuned | Longer] = {
    "two stages 25x, Muon": HeldOut(1.6, 6.9),
    "eigenbasis 50x, Muon": HeldOut(1.2, 4.0),
    "4 local steps of Muon, 25x": HeldOut(3.0, 6.0),
    "PowerSGD 4, Muon with a lead": HeldOut(2.8, 6.4),
    "PowerSGD rank 4": HeldOut(3.3, 6.8),
    "QSGD 4 bits": Tuned(0.4, -0.3),
    "TernGrad, shared scale": Tuned(1.3, 0.0),
    "EDEN 1 bit (DRIVE)": Tuned(0.7, 0.0, 2.7),
    "random-k 10 %": Tuned(-0.3, 0.1),
    "ACP-SGD rank 4": Tuned(2.3, 0.3),
    "shared top-k 4 %": Tuned(1.4, 0.6),
    "top-k 4 %, 4 bits": Tuned(-0.9, 0.3, 2.6),
    "DCT 64, 4 %, 4 bits": Tuned(-2.0, 0.6, 0.5),
    "two stages, top-k 4 %, 4 bits": Tuned(0.4, 0.1, 5.4),
    "signs, two stages": Longer(1.4),
    "2 bits, two stages": Longer(1.13),
    "4 local steps, signs": Longer(1.2),
    "8 local steps, signs": Longer(1.33),
}
"""Of each candidate that is not dense: two seeds, or after 2,000 steps one."""

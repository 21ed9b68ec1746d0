"""Exchanges that are made of others."""

import abc

from fftgrad._contracts import Exchange


class Composite(Exchange):
    """An exchange made of others; what it says of itself, it asks of them."""

    @property
    @abc.abstractmethod
    def inner(self) -> tuple[Exchange, ...]:
        """The exchanges that it is made of."""

    @property
    def needs_loss(self) -> bool:
        return any(exchange.needs_loss for exchange in self.inner)

    @property
    def watches_error(self) -> bool:
        """Whether it goes by x - sent, over all workers of its axis."""
        return any(map(watches_error, self.inner))

    @property
    def keeps_error(self) -> bool:
        """Whether a memory of its own keeps what it loses, so that `sent` is x."""
        return any(map(keeps_error, self.inner))


def watches_error(exchange: Exchange) -> bool:
    """Whether it goes by x - sent, which no simple exchange does."""
    return isinstance(exchange, Composite) and exchange.watches_error


def keeps_error(exchange: Exchange) -> bool:
    """Whether its `sent` is x, whatever it loses, which is so of no simple exchange."""
    return isinstance(exchange, Composite) and exchange.keeps_error

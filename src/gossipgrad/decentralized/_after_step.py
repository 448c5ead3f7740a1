"""What a round does once the optimizers have stepped: mix, average if that is due, send."""

from gossipgrad.comm import Recorder
from gossipgrad.decentralized._averaging import Averaging
from gossipgrad.decentralized._rounds import Rounds
from gossipgrad.decentralized._sections import Sections
from gossipgrad.decentralized._settings import Gradients, Settings

__all__ = ["after_step"]


def after_step(
    rounds: Rounds,
    sections: Sections,
    averaging: Averaging,
    settings: Settings,
    *,
    steps: int,
    recorder: Recorder | None,
) -> bool:
    """Closes the round that ends with this step and opens the next; whether all were averaged.

    Args:
        rounds: The session's.
        sections: What travels.
        averaging: Makes periodic averages.
        settings: Say what is due when.
        steps: That were made, this one too.
        recorder: Gets the span of an average.
    """
    closes = steps % settings.every == 0
    averages = settings.average_every is not None and steps % settings.average_every == 0
    averaged = False
    try:
        if closes and settings.sends_early and not averages:
            rounds.advance(sections.of_round)
            return False
        if closes:
            if isinstance(settings.payload, Gradients):
                rounds.next_round += 1
            elif not settings.sends_early:
                rounds.open(sections.of_round(rounds.next_round))
            rounds.close()
        averaged = averages and averaging.periodically(sections, steps, recorder)
        if closes and settings.sends_early:
            rounds.open(sections.of_round(rounds.next_round))
        return averaged
    finally:
        rounds.patience.renew()

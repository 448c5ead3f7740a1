"""What dealing anew has done and cost."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticStats:
    """What one rank's `ElasticBatches` have done so far; no communication.

    Attributes:
        samples: That this rank was given.
        samples_dealt_anew: Of these, those that had been dealt to another rank at first.
        samples_used_twice_at_most: Of these, those that a rank which is gone had begun to train on,
            or was about to: it had claimed them, and died before it said more.
        samples_untold: That this rank was given while the store did not answer: another may have
            been given them, too.
        samples_left: That ranks which are gone have left of the last epoch, and nobody has trained
            on; known after `close()`.
        disturbed_epochs: In which ranks came or went, or had come or gone before.
        store_requests: Asked of the store, in the background.
        exposed_seconds: Time that batches waited for the store.
    """

    samples: int = 0
    samples_dealt_anew: int = 0
    samples_used_twice_at_most: int = 0
    samples_untold: int = 0
    samples_left: int = 0
    disturbed_epochs: int = 0
    store_requests: int = 0
    exposed_seconds: float = 0.0

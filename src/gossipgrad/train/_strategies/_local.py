"""No communication at all."""

from torch import nn

from gossipgrad.train._evaluate import Evaluation, TestPart

from ._strategy import Strategy, Traffic, alone


class Local(Strategy):
    """Every rank trains on its own: the lower bound of cost and of what sharing gains."""

    meets = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate this rank's replica on the whole test part."""
        return alone(self.model, test, final=final, is_consensus=False)

    def traffic(self) -> Traffic:
        """Nothing was sent."""
        return Traffic()

    def close(self) -> None:
        """Nothing to let go of."""

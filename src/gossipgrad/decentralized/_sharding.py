"""Models that FSDP2 shards: letting go of what was gathered."""

import sys

from torch import nn

__all__ = ["reshard"]


def reshard(model: nn.Module) -> None:
    """Lets go of full parameters that FSDP2 has gathered and would use again; local.

    After a forward pass without a backward pass, the root module keeps them for the next one. They
    are copies: once the shards are written, the next pass must gather anew.
    """
    loaded = sys.modules.get("torch.distributed.fsdp")  # its import takes long where it is unused
    if loaded is not None:
        for module in model.modules():
            if isinstance(module, loaded.FSDPModule):
                module.reshard()

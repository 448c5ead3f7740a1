"""torchtitan: two replicas of Llama, sharded with FSDP2, that gossip. Needs accelerators.

Of examples/torchtitan_config.py it takes `--config gossip_debugmodel`:

    torchrun --nproc-per-node 4 -m torchtitan.train --module examples.torchtitan_config ...
"""

from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from gossipgrad.integrations.torchtitan import gossip_spec


def gossip_debugmodel():
    """Return the debug model's configuration, whose replicas gossip."""
    config = llama3_debugmodel()
    config.model_spec = gossip_spec(model_registry("debugmodel"), mode="overlap")
    config.parallelism.data_parallel_replicate_degree = 2  # replicas that gossip
    config.parallelism.data_parallel_shard_degree = 2  # ranks that share each of them
    config.parallelism.spmd_backend = "partial_dtensor"
    return config

"""Data sets, and how ranks share their samples."""

from ._dataset import Dataset as Dataset
from ._dataset import DatasetInfo as DatasetInfo
from ._dataset import Samples as Samples
from ._dataset import TensorSamples as TensorSamples
from ._digits import load_digits as load_digits
from ._elastic import ElasticBatches as ElasticBatches
from ._elastic import ElasticStats as ElasticStats
from ._elastic import Member as Member
from ._fashion_mnist import read_idx as read_idx
from ._registry import NAMES as NAMES
from ._registry import info as info
from ._registry import load as load
from ._registry import prepare as prepare
from ._ring_shuffle import RingShuffle as RingShuffle
from ._ring_shuffle import RingShuffleStats as RingShuffleStats
from ._sampler import ShardedSampler as ShardedSampler
from ._shards import ShardedBatches as ShardedBatches
from ._shards import made_ahead as made_ahead
from ._shards import num_batches as num_batches
from ._shards import shard_bounds as shard_bounds
from ._shards import split_batches as split_batches

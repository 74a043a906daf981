"""Embedding tables that are cut by rows over the ranks of a group, and their checkpoints."""

from .checkpoints import load_sharded_state, sharded_state
from .tables import (
    ShardedEmbedding,
    ShardedEmbeddingBag,
    shard_embeddings,
    sharded_lookup,
)

__all__ = [
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "load_sharded_state",
    "shard_embeddings",
    "sharded_lookup",
    "sharded_state",
]

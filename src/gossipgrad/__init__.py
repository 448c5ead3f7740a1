"""gossipgrad."""

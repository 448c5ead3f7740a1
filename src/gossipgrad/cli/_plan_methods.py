"""What the methods of `gossipgrad plan` are called."""

__all__ = ["AS_IS", "METHODS", "NARROW", "NARROW_BYTES"]

NARROW = ("fp16", "bf16")
NARROW_BYTES = 2
METHODS = ("sparse", "dense", *NARROW)
"""What a plan may choose among."""
AS_IS = "dense as is"
"""DDP's all-reduce of gradients that a session widens before it adds them up."""

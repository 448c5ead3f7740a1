"""What `compress` may be."""

from typing import Any

from gossipgrad.compression import SharedMask

__all__ = ["resolve_compress"]


def resolve_compress(compress: Any) -> SharedMask | None:
    """A shared mask by value, or by name and density: `"shared-mask:0.1"`; None for none.

    Raises:
        ValueError: There is no such, or its density cannot be.
    """
    if compress is None or isinstance(compress, SharedMask):
        return compress
    if isinstance(compress, str):
        kind, _, density = compress.partition(":")
        if kind == "top-k":
            raise ValueError(
                f"compress={compress!r}: gossip of the largest differences was removed. Use "
                "gg.SharedMask(density), such as 'shared-mask:0.1', which goes with any topology "
                "and keeps no copies of weights"
            )
        if kind == "shared-mask":
            try:
                share = float(density)
            except ValueError:
                pass
            else:
                return SharedMask(share)
    raise ValueError(
        f"compress must be gg.SharedMask(density), or such as 'shared-mask:0.1', got "
        f"{compress!r}: None sends all weights"
    )

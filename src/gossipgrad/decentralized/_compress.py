"""What `compress` may be, and what it goes with."""

from typing import Any

from gossipgrad.compression import SharedMask, TopK

__all__ = ["Compressor", "name_of", "resolve_compress"]

Compressor = SharedMask | TopK

_KINDS: dict[str, type[Compressor]] = {"shared-mask": SharedMask, "top-k": TopK}


def resolve_compress(compress: Any) -> Compressor | None:
    """A compressor by value or name with density, such as `"shared-mask:0.1"`; None for none.

    Raises:
        ValueError: There is no such, or its density cannot be.
    """
    if compress is None or isinstance(compress, Compressor):
        return compress
    if isinstance(compress, str):
        kind, _, density = compress.partition(":")
        try:
            share = float(density)
        except ValueError:
            share = None
        if kind in _KINDS and share is not None:
            return _KINDS[kind](share)
    raise ValueError(
        f"compress must be gg.SharedMask(density), gg.TopK(density), or such as 'shared-mask:0.1' "
        f"or 'top-k:0.01', got {compress!r}: None sends all weights"
    )


def name_of(compress: Compressor) -> str:
    """The name with which `resolve_compress` makes it again."""
    (name,) = (name for name, kind in _KINDS.items() if isinstance(compress, kind))
    return f"{name}:{float(compress.density)!r}"

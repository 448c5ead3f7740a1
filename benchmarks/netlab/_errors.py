"""What the laboratory raises."""

__all__ = ["NetlabError"]


class NetlabError(RuntimeError):
    """The machine cannot carry, lacks or does not keep to what the laboratory was asked for."""

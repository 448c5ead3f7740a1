"""Image files through Pillow."""

from importlib.util import find_spec


def check_pillow(name: str) -> None:
    """Raise `ValueError` if Pillow is missing, which data `name` needs."""
    if find_spec("PIL") is None:
        raise ValueError(f"data {name!r} is read with Pillow: pip install 'gossipgrad[images]'.")

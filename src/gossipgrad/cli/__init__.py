"""The command `gossipgrad`."""

from ._main import main as main

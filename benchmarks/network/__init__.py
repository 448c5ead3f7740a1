"""A network of hosts on one machine, and ways to keep replicas together that are timed on it."""

from ._namespaces import NetworkError as NetworkError
from ._network import Network as Network
from ._network import run_everywhere as run_everywhere

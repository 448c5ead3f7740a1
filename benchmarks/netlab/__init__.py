"""A network of hosts on one machine: namespaces behind links shaped in both directions."""

from ._build import Counters as Counters
from ._errors import NetlabError as NetlabError
from ._network import Network as Network
from ._rates import format_rate as format_rate
from ._rates import parse_rate as parse_rate

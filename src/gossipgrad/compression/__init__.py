"""What is sent of a tensor, and as which bytes: exact selection, and messages of fixed size."""

from ._select import top_k as top_k
from ._sparse_format import SparseFormat as SparseFormat

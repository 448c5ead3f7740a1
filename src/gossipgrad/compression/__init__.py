"""Exact selection of a tensor's elements, and messages of fixed size."""

from ._shared_mask import SharedMask as SharedMask
from ._sparse_format import VALUE_DTYPES as VALUE_DTYPES
from ._sparse_format import SparseFormat as SparseFormat
from ._sparse_format import narrowed as narrowed
from ._top_k import check_density as check_density
from ._top_k import top_k as top_k

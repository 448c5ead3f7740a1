"""The base of optimizers of matrices, and the gradients that an update may use."""

from gossipgrad.optim._finite import are_finite as are_finite
from gossipgrad.optim._finite import finite_flags as finite_flags
from gossipgrad.optim._finite import parameters_to_update as parameters_to_update
from gossipgrad.optim._finite import warn_of_nonfinite as warn_of_nonfinite
from gossipgrad.optim._matrix_optimizer import MatrixOptimizer as MatrixOptimizer
from gossipgrad.optim._matrix_optimizer import Parameters as Parameters
from gossipgrad.optim._matrix_optimizer import is_number as is_number
from gossipgrad.optim._matrix_optimizer import unwrapped as unwrapped
from gossipgrad.optim._roles import ADAMW as ADAMW
from gossipgrad.optim._roles import choose_roles as choose_roles
from gossipgrad.optim._roles import owners_of as owners_of
from gossipgrad.optim._shares import distribute as distribute

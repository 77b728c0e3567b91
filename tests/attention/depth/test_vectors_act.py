"""ACT reproduces Graves' adaptive computation time with copied states, by the formula of the vector.

The vector's weights sum to less than 1 for tokens that reach the last pass. Those tokens get the remainder in
`ACT`, as in the paper; test_depth.py compares them with a slow loop.
"""

import torch
from torch import Tensor

from rlxf.attention import ACT
from tests.attention.oracle import close, load, put

VECTOR = load("universal_act")
STATES = VECTOR["in_x"].double()
TRANSITION = VECTOR["w_t"].double()


class Transitions:
    """Passes with the vector's transition function, in which each token attends to all others."""

    count = int(VECTOR["cfg_max_steps"])
    filled = torch.ones(STATES.shape[:2], dtype=torch.bool)

    def start_pass(self, number: int, x: Tensor) -> Tensor:
        return x

    def run(self, number: int, x: Tensor) -> Tensor:
        return (x @ TRANSITION + x.mean(dim=1, keepdim=True)).tanh()

    def skip(self, number: int, x: Tensor) -> None:
        """Do nothing: there are no later tokens."""

    def attention_input(self, x: Tensor) -> Tensor:
        return x

    def select_outputs(self, x: Tensor) -> Tensor:
        return x


def test_outputs_and_number_of_passes_of_each_token():
    processor = ACT(epsilon=float(VECTOR["cfg_eps"])).build(STATES.shape[-1], Transitions.count).double()
    put(processor.w, VECTOR["w_halt"][:, 0])
    put(processor.b, VECTOR["w_bhalt"][0])
    halted = VECTOR["out_halted"]
    close(processor(STATES, Transitions())[halted], VECTOR["out_formula_copy_halted"][halted])
    close(processor.mean_depth(), VECTOR["out_formula_copy_n"].mean())

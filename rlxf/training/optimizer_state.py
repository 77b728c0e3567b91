"""What an optimiser keeps for each parameter, as named tensors and back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rlxf.training.fit import check_shape, misfit


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """``{"3.exp_avg": ...}``: the tensors that are kept for each parameter, by its number."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, kept in state.items()
        for name, value in kept.items()
        if isinstance(value, Tensor)
    }


def optimizer_state(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """`optimizer_tensors` as ``optimizer.load_state_dict`` takes them; its settings stay as they are.

    Raises:
        CheckpointError: if a tensor is of no parameter, or neither shaped as that nor a single number.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        if not number.isdecimal() or int(number) >= len(parameters):
            raise misfit(f"optimizer has a tensor {key!r}, for which the agent has no parameter")
        if tensor.dim():
            check_shape("optimizer", key, tensor, parameters[int(number)])
        state.setdefault(int(number), {})[name] = tensor
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}

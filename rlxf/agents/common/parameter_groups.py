"""Parameters of a policy by layer and sublayer, for logs and figures."""

import re
from collections import defaultdict

from torch import nn

GROUP_OUTSIDE_LAYERS = {
    "features_extractor": "features",
    "action_token": "token",
    "embedding": "position_embedding",
    "norm": "final_norm",
    "action_net": "action_head",
    "value_net": "value_head",
    "reconstruction_net": "reconstruction_head",
}
"""Module outside of the layers -> group of its parameters."""


def parameter_groups(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of a policy by group, see `group_of`."""
    groups = defaultdict(list)
    for name, parameter in module.named_parameters():
        groups[group_of(name)].append(parameter)
    return dict(groups)


def group_of(name: str) -> str:
    """Return the group of a parameter.

    For example, ``transformer.blocks.0.attention_norm.residual.w`` is in ``layer_1/attention_gate``. The
    groups of a layer are attention, feed_forward, the gate of each, and norms. Outside of the layers a group
    is a module of the policy, e.g. ``value_head``.
    """
    name = name.removeprefix("transformer.")
    layer = re.match(r"blocks\.(\d+)\.(\w+)\.(\w+)", name)
    if layer is None:
        part = name.split(".")[0]
        return GROUP_OUTSIDE_LAYERS.get(part, part)
    number, sublayer, part = layer.groups()
    gate = f"{sublayer.removesuffix('_norm')}_gate"
    return f"layer_{int(number) + 1}/{ {'norm': 'norms', 'residual': gate}.get(part, sublayer) }"

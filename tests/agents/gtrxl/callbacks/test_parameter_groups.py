"""Every parameter belongs to a named group."""

from dataclasses import replace

from rlxf.agents.gtrxl.callbacks.metrics import parameter_groups
from rlxf.attention import Add, LearnedAbsolute
from tests.agents.gtrxl.worlds import ACTIONS, IMAGE, scripts, shifted, small_agent, small_core

LAYER = {"attention", "feed_forward", "norms"}
GATES = {"attention_gate", "feed_forward_gate"}
OUTSIDE = {"token", "final_norm", "action_head", "value_head"}


def of_layers(*groups: str) -> set[str]:
    return {f"layer_{n}/{group}" for n in (1, 2) for group in groups}


def groups_of(**changes) -> dict:
    spaces = changes.pop("spaces", ())
    return parameter_groups(small_agent(scripts(shifted(3), *spaces), **changes).policy)


def test_a_gated_agent():
    assert set(groups_of()) == OUTSIDE | of_layers(*LAYER, *GATES)


def test_an_agent_without_gates():
    assert set(groups_of(core=small_core(residual=Add()))) == OUTSIDE | of_layers(*LAYER)


def test_groups_of_optional_modules():
    core = replace(small_core(), position=LearnedAbsolute(64))
    spaces = (IMAGE, ACTIONS["Box"])
    groups = groups_of(core=core, spaces=spaces, policy="CnnGTrXLPolicy", reconstruction_coef=0.1)
    more = {"features", "position_embedding", "log_std", "reconstruction_head"}
    assert set(groups) == OUTSIDE | of_layers(*LAYER, *GATES) | more


def test_groups_partition_the_parameters():
    policy = small_agent(scripts(shifted(3)), reconstruction_coef=0.1).policy
    grouped = [parameter for group in parameter_groups(policy).values() for parameter in group]
    assert sorted(map(id, grouped)) == sorted(map(id, policy.parameters()))


def test_group_contains_parameters_of_its_module():
    policy = small_agent(scripts(shifted(3))).policy
    block = policy.transformer.blocks[1]
    for name, part in {
        "attention": block.attention,
        "feed_forward_gate": block.feed_forward_norm.residual,
    }.items():
        assert set(map(id, parameter_groups(policy)[f"layer_2/{name}"])) == set(map(id, part.parameters()))

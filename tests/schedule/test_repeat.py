"""Schedules of many layers, extrapolated from schedules of few layers."""

from dataclasses import replace

import pytest

from overlapc.schedule.model import Origin
from overlapc.schedule.repeat import Irregular, repeated
from overlapc.schedule.text import parse


def step(layers, *, time_of=lambda layer: "20us", wide=0):
    """Return a schedule with forward and backward of `layers` layers.

    There are two parameters and one saved input per layer, backward runs in reverse order, and its names continue the
    numbering of forward.
    """
    lines = ["schedule step", "x = input : 1MiB"]
    lines += [f"p_{at} = input : 8MiB" for at in range(2 * layers)]
    lines += [f"saved_{at} = input freeable : 2MiB" for at in range(layers)]
    lines += ["h_0 = kernel(x) : 4MiB 5us"]
    for at in range(layers):
        lines += [
            f"ag_{at} = all_gather(p_{2 * at}) @dp(4) unit=layers.{at} : 32MiB 90us",
            f"w_{at} = wait(ag_{at})",
            f"h_{at + 1}, n_{at} = kernel(h_{at}, w_{at}, p_{2 * at + 1}) : 4MiB, 1KiB {time_of(at)}",
        ]
    lines += [f"loss = kernel(h_{layers}{', h_0' * wide}) : 4B 3us", f"g_{layers} = kernel(loss) : 4MiB 5us"]
    for back, at in enumerate(reversed(range(layers))):
        lines += [
            f"g_{layers + back + 1} = kernel(g_{layers + back}, h_{at}, n_{at}, saved_{at}) : 4MiB 40us",
            f"rs_{back} = reduce_scatter(g_{layers + back + 1}) @dp(4) unit=layers.{at} : 1MiB 90us",
            f"s_{back} = wait(rs_{back})",
        ]
    lines += ["return " + ", ".join(["loss", *(f"s_{at}" for at in range(layers))])]
    schedule = parse("\n".join(lines))
    where = {node.name: Origin((f"fx_{at}",), "model.py:7", "") for at, node in enumerate(schedule.nodes)}
    return replace(schedule, nodes=tuple(replace(node, origin=where[node.name]) for node in schedule.nodes))


def few(*layers, **how):
    return {each: step(each, **how) for each in layers}


@pytest.mark.parametrize("layers", [3, 5, 6, 40])
def test_schedules_of_more_layers_equal_traced_ones(layers):
    whole = step(layers)
    found = repeated(few(3, 4, 5), layers)
    assert found == whole
    assert str(found) == str(whole)  # origins too
    assert list(found.buffers) == list(whole.buffers)


def test_a_time_that_changes_along_the_layers_is_irregular():
    with pytest.raises(Irregular, match="does not repeat the lines before it"):
        repeated(few(3, 4, 5, time_of=lambda layer: f"{20 + layer}us"), 9)


def test_the_third_schedule_must_confirm_the_first_two():
    schedules = {**few(3, 4), 5: step(5, wide=1)}
    with pytest.raises(Irregular, match=r"loss differs from what fewer layers predict: h_5, h_0 instead of h_5$"):
        repeated(schedules, 9)


def test_numbers_that_grow_by_no_rule_are_irregular():
    schedules = few(3, 4, 5)
    odd = str(schedules[5]).replace("ag_2 ", "ag_77 ").replace("(ag_2)", "(ag_77)")
    with pytest.raises(Irregular, match="do not continue"):
        repeated({**schedules, 5: parse(odd)}, 9)


def test_more_growth_than_before_is_irregular():
    with pytest.raises(Irregular, match="has numbers that do not continue the lines before it"):
        repeated({**few(3, 4), 5: step(6)}, 9)
    texts = {layers: str(each) for layers, each in few(3, 4, 5).items()}
    texts[5] = texts[5].rstrip() + ", h_0"  # returned too
    with pytest.raises(Irregular, match="the schedules grow by 10 and 11 lines per layer"):
        repeated({layers: parse(text) for layers, text in texts.items()}, 9)


def test_payloads_are_those_of_corresponding_nodes():
    def carrying(schedule):
        return replace(schedule, nodes=tuple(replace(node, payload=node.op) for node in schedule.nodes))

    found = repeated({layers: carrying(each) for layers, each in few(3, 4, 5).items()}, 8)
    assert all(node.payload == node.op for node in found.nodes)

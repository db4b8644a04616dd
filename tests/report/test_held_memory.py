"""The peak memory of a step includes memory that the running graph does not know of: inputs of forward only, and
optimizer state."""

from dataclasses import replace

from overlapc.report.held_memory import peak_parts, peaks, step_peak_bytes
from overlapc.report.model import StepRecord
from tests.report.sample import FORWARD

MIB = 2**20
GRAPH = replace(
    FORWARD,
    name="forward_3",
    peak_bytes=100 * MIB,
    schedule="""schedule forward_3
primals_1 = input : 8MiB
primals_2 = input : 4MiB
primals_3 = input : 2MiB
y = kernel(primals_1, primals_2, primals_3) : 1MiB
""",
)


def backward(inputs):
    text = f"schedule backward_3\n{inputs}\ntangents_1 = input : 1MiB\ng = kernel(tangents_1) : 1MiB\n"
    return replace(GRAPH, name="backward_3", schedule=text, peak_bytes=50 * MIB)


def test_inputs_of_forward_only_count_in_the_peak_of_backward():
    found = peaks([GRAPH, backward("primals_1 = input : 8MiB\nsaved = input freeable : 16MiB")])
    assert found == {"forward_3": 100 * MIB, "backward_3": (50 + 4 + 2) * MIB}


def test_a_saved_view_of_a_parameter_counts_once():
    """Because it may not be freed, it is distinguished from tensors that forward saved only for backward."""
    found = peaks([GRAPH, backward("permute_7 = input : 4MiB\nsaved = input freeable : 16MiB")])
    assert found["backward_3"] == (50 + 8 + 2) * MIB


def test_memory_shared_for_copies_counts_for_every_graph_as_for_the_one_that_shares_most():
    forward = replace(GRAPH, pool_bytes=3 * MIB)
    found = peaks([forward, replace(backward("primals_1 = input : 8MiB"), pool_bytes=10 * MIB)])
    assert found == {"forward_3": (100 + 7) * MIB, "backward_3": (50 + 4 + 2) * MIB}


def test_a_backward_without_its_forward_keeps_its_own_peak():
    assert peaks([backward("primals_1 = input : 8MiB")]) == {"backward_3": 50 * MIB}


def test_the_peak_of_a_step_includes_optimizer_state_and_update():
    graphs = (GRAPH, backward("primals_1 = input : 8MiB"))
    step = StepRecord(graphs=graphs)
    assert (step_peak_bytes(step), peak_parts(step)) == (100 * MIB, "optimizer state is not included")
    step = replace(step, optimizer_bytes={"AdamW": 20 * MIB}, update_peak_bytes=110 * MIB)
    assert (step_peak_bytes(step), peak_parts(step)) == (120 * MIB, "20MiB of it is the state of AdamW")
    step = replace(step, update_peak_bytes=130 * MIB, calls={"forward_3": 2, "backward_3": 2})
    assert step_peak_bytes(step) == 130 * MIB
    assert peak_parts(step) == (
        "while the optimizer steps (120MiB in the compiled graphs); 20MiB of it is the state of AdamW;"
        " gradients of earlier micro-batches are not included"
    )
    assert peak_parts(StepRecord(graphs=(GRAPH,))) == "", "inference has no optimizer state"

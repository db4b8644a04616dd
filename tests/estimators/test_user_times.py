"""Times that the user provides precede every model."""

import pytest
import torch

import overlapc
from overlapc.errors import ConfigError
from overlapc.estimators.user_times import EarlierRun, UserHook, signature_of
from overlapc.report import record
from overlapc.schedule.model import Comm, Estimate, Kind, Node, Work
from overlapc.schedule.text import parse

MM = Node("mm", Kind.EXTERN, "mm", work=Work(10, 20, 30, "float32"))


def test_a_function_returns_nanoseconds_an_estimate_or_none():
    assert UserHook(lambda node: 250.0).estimate(MM) == Estimate(250.0, "user")
    assert UserHook(lambda node: Estimate(1.0, "oracle")).estimate(MM) == Estimate(1.0, "oracle")
    assert UserHook(lambda node: None).estimate(MM) is None


@pytest.mark.parametrize("said", ["3us", float("nan"), -1.0, True])
def test_other_results_of_a_function_are_an_error_that_names_the_node(said):
    with pytest.raises(ConfigError, match="for mm"):
        UserHook(lambda node: said).estimate(MM)


def test_an_earlier_run_estimates_nodes_by_name_or_by_signature():
    signature = signature_of(MM)
    seen = {
        ("forward_0", "mm"): (signature, 100.0),
        ("forward_0", "mm_1"): (signature, 300.0),
        ("forward_0", "gone"): ("extern other", 5.0),
        ("backward_0", "only"): ("", 7.0),
    }
    run = EarlierRun.of("forward_0", seen, "earlier")
    assert run.estimate(MM) == Estimate(100.0, "earlier")
    assert run.estimate(Node("new", MM.kind, MM.op, work=MM.work)) == Estimate(200.0, "earlier, nodes like it")
    assert (
        run.estimate(Node("gone", Kind.EXTERN, "mm", work=Work(1, 1, 1, "float32"))) is None
    )  # the name belongs to another op now
    assert run.estimate(Node("only", Kind.KERNEL, "kernel")) is None  # of another graph
    assert EarlierRun.of("backward_0", seen, "e").estimate(Node("only", Kind.KERNEL, "kernel")).ns == 7.0


def test_signatures_differ_by_size_ranks_and_transport():
    def gather(size, ranks, via=""):
        return Node("ag", Kind.START, "all_gather", comm=Comm("all_gather", size, "dp", ranks, "bf16", via=via))

    assert len({signature_of(gather(*each)) for each in ((1, 2), (2, 2), (1, 4), (1, 2, "copy"))}) == 4
    assert signature_of(gather(1, 2)) == signature_of(Node("other", Kind.START, "all_gather", comm=gather(1, 2).comm))


def _sources() -> set[str]:
    graph = record.report_of_process().steps[0].graphs[-1]
    return {n.estimate.source for n in parse(graph.schedule).nodes if n.kind is Kind.EXTERN and n.estimate}


def _compiled(estimates):
    torch._dynamo.reset()
    options = {"profile": "cpu-gloo", "estimates": estimates}
    return torch.compile(lambda x: torch.relu(x @ x) @ x, backend="overlapc", options=options)


def test_a_function_and_a_measured_record_replace_the_models_estimates(tmp_path):
    x = torch.rand(8, 8)
    _compiled(lambda node: 5.0 if node.op == "mm" else None)(x)
    assert _sources() == {"user"}
    record.clear()
    step = _compiled(None)
    step(x)
    assert _sources() == {"roofline cpu-gloo"}
    with overlapc.report.measure(tmp_path / "trace.json") as measured:
        step(x)
    measured.report.save(tmp_path / "record.json")
    _compiled(str(tmp_path / "record.json"))(x)
    assert _sources() == {
        "measured record.json, nodes like it"
    }  # forward graphs are numbered, so this one has another name


def test_files_without_measurements_are_errors(tmp_path):
    (tmp_path / "x.json").write_text('{"traceEvents": []}')
    for name, message in (("missing.json", "cannot read"), ("x.json", "no marks of overlapc")):
        with pytest.raises(ConfigError, match=message):
            _compiled(str(tmp_path / name))(torch.rand(8, 8))

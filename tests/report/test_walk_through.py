import re

from overlapc.estimators.timeline import simulate
from overlapc.report.drawing import to_dot
from overlapc.report.walk_through import describe, walk_through
from overlapc.schedule.text import parse

TEXT = """
    ag = all_gather(p) @dp : 4B 60us; h = kernel(x) : 8B 48us; w = wait(ag); y = kernel(h, w) : 2B 5us
    rs = reduce_scatter(y) @dp : 1B 10us; z = kernel(y) : 1B 20us; s = wait(rs); return s, z
"""


def test_every_node_shows_what_overlaps_it_and_where_compute_waits():
    lines = walk_through(simulate(parse(TEXT))).splitlines()
    marks = [(line.split()[2], line.split()[3]) for line in lines[1:-1] if re.match(r"\s*\d", line)]
    assert marks == [(">", "ag"), ("|", "h"), ("!", "w"), ("y", "="), (">", "rs"), ("|", "z"), ("<", "s")]
    assert "12.0 exposed, 12.0 so far" in lines[3]
    assert "10.0 beside communication" in lines[6]
    assert lines[-1].startswith("step 85.0 us: compute 73.0, exposed 12.0")


def test_the_long_form_of_a_node_has_its_time_and_neighbours():
    text = describe(simulate(parse(TEXT)), "y")
    assert "statement  y = kernel(h, w) : 2B  5us" in text
    assert "runs       60.0 to 65.0 us" in text
    assert "needs      h, w" in text
    assert "needed by  rs, z" in text


def test_a_drawing_has_every_node_and_dependence():
    schedule = parse(TEXT)
    dot = to_dot(schedule)
    assert dot.count("shape=") == len(schedule.nodes)
    assert "n1 -> n3 [style=solid];" in dot  # h, y
    assert "n0 -> n4 [style=dotted];" in dot  # ag, rs
    assert dot.count("fillcolor=lightblue") == 4

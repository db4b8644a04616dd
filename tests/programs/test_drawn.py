"""A hundred short random programs, others each day, judged against eager.

What torch's own tracing gets wrong alike, or Inductor does, is no failure. A failure prints its program and the command
that repeats it; `OVERLAPC_TEST_SEED=2026327 pytest tests/programs` draws a day's hundred again. Longer programs, and
those on GPUs: benchmarks/random_programs.py.
"""

from __future__ import annotations

import os
import time

import pytest

from tests.programs.draw import draw
from tests.programs.judge import by_aot_eager, by_inductor, judge

# By the day, in place of chance: workers of pytest-xdist must agree on it.
SEED = int(os.environ.get("OVERLAPC_TEST_SEED", time.strftime("%Y%j")))
COUNT = 100


@pytest.mark.parametrize("seed", range(1000 * SEED, 1000 * SEED + COUNT))
def test_a_program_drawn_by_todays_seed(seed: int) -> None:
    program = draw(seed, short=True)
    verdict = judge(program)
    if not verdict.wrong or judge(program, compiler=by_aot_eager).what == verdict.what:
        return
    again = f"python benchmarks/random_programs.py --short --seed {seed} --count 1 --beside-inductor"
    text = f"{verdict.kind}: {verdict.message}\n{program.code()}\n{dict(program.options)}\nagain: {again}"
    assert judge(program, compiler=by_inductor).wrong, text

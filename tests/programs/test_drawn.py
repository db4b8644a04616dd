"""Short random programs, different ones each day, compared with eager.

A wrong result is not counted as a failure if aot_eager gives the same verdict or Inductor is wrong, too. A failure
prints its program and the command that repeats it; `OVERLAPC_TEST_SEED=2026327 pytest tests/programs` repeats the
programs of a day. benchmarks/random_programs.py runs longer programs, also on GPUs.
"""

from __future__ import annotations

import os
import time

import pytest

from tests.programs.draw import draw
from tests.programs.judge import by_aot_eager, by_inductor, judge

# The day, because all workers of pytest-xdist must use the same seed.
SEED = int(os.environ.get("OVERLAPC_TEST_SEED", time.strftime("%Y%j")))
COUNT = 36  # of about a second each; benchmarks/random_programs.py draws more


@pytest.mark.parametrize("seed", range(1000 * SEED, 1000 * SEED + COUNT))
def test_a_program_drawn_by_todays_seed_equals_eager(seed: int) -> None:
    program = draw(seed, short=True)
    verdict = judge(program)
    if not verdict.wrong or judge(program, compiler=by_aot_eager).what == verdict.what:
        return
    again = f"python benchmarks/random_programs.py --short --seed {seed} --count 1 --beside-inductor"
    text = f"{verdict.kind}: {verdict.message}\n{program.code()}\n{dict(program.options)}\nagain: {again}"
    assert judge(program, compiler=by_inductor).wrong, text

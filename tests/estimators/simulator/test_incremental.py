"""After every move, an incremental replay gives bitwise the same times as a simulation of the whole order."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.config import Config
from overlapc.estimators.device import IDEAL, DeviceProfile, Slowdown
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.estimators.simulator.incremental import BLOCK, Replay
from overlapc.estimators.simulator.machine import Costs, Machine, costs_of
from overlapc.estimators.simulator.native import NativeReplay, library_in, replay_of, simulated
from overlapc.estimators.timeline import Timeline, simulate
from overlapc.schedule import dependencies
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse
from tests.graphs import schedules

_SLOW = {"other": Slowdown(1.37, 1.7, own_matmul=1.11, own_memory=1.23)}
PROFILES = (
    IDEAL,
    DeviceProfile("contention", slowdowns=_SLOW, collective_slowdown=1.25),
    DeviceProfile("host", slowdowns=_SLOW, launch_ns=3.3, kernel_gap_ns=0.7),
    DeviceProfile("slow host", slowdowns=_SLOW, launch_ns=13.7),
    DeviceProfile("cpu", slowdowns=_SLOW, launch_ns=3.1, synchronous=True),
    DeviceProfile("waits", slowdowns=_SLOW, launch_ns=2.9, collectives_wait_for_kernels=True),
    load_profile("h200-nvlink"),
)


def native(schedule: Schedule, profile: DeviceProfile, block: int = BLOCK) -> NativeReplay:
    library = library_in(Config().cache_dir)
    assert library is not None
    return NativeReplay(library, schedule, profile, block=block)


def check(replay: Replay, schedule: Schedule, profile: DeviceProfile) -> Timeline:
    """Compare the replay with a simulation of its order, and return the simulated timeline."""
    names = [schedule.nodes[at].name for at in replay.order]
    whole = simulate(schedule.replace_order(names, reorder_collectives=True), profile)
    timing = replay.timing
    assert timing.step_ns == whole.step_ns
    assert timing.launch_idle_ns == whole.launch_idle_ns
    exposed = {name: each.exposed_ns for name, each in whole.collectives.items() if each.exposed_ns}
    assert {schedule.nodes[at].name: ns for at, ns in replay.exposed.items()} == exposed
    assert timing.exposed_ns == pytest.approx(whole.exposed_ns, rel=1e-12)
    assert timing.compute_ns == pytest.approx(whole.compute_ns, rel=1e-9)
    return whole


def legal_move(schedule: Schedule, replay: Replay, rng: random.Random) -> tuple[int, int, int]:
    """Return (low, high, to) of a random move that keeps every dependence except the order of collectives."""
    deps = dependencies.of(schedule)
    count = len(schedule.nodes)
    low = rng.randrange(count)
    high = min(count, low + rng.choice((1, 1, 1, 2, 3)))
    block = set(replay.order[low:high])

    def free(at: int, near: list[list[int]]) -> bool:
        node = replay.order[at]
        edges = [(other, node) if near is deps.preds else (node, other) for other in near[node] if other in block]
        return all(deps.why[edge] is dependencies.Why.COLLECTIVE_ORDER for edge in edges)

    first, last = low, high
    while first > 0 and free(first - 1, deps.succs):
        first -= 1
    while last < count and free(last, deps.preds):
        last += 1
    return low, high, rng.randint(first, last - (high - low))


@given(schedules(most_nodes=30), st.integers(0, 10**6), st.sampled_from(PROFILES), st.sampled_from((1, 2, 3, 24)))
@settings(max_examples=400)
def test_a_replay_equals_a_simulation_of_the_whole_order_after_every_move(schedule, seed, profile, block):
    rng = random.Random(seed)
    replay, in_c = Replay(schedule, profile, block=block), native(schedule, profile, block)
    check(replay, schedule, profile)
    for _ in range(12):
        move = legal_move(schedule, replay, rng)
        tried = replay.try_move(*move)
        assert in_c.try_move(*move) == tried
        if rng.random() < 0.3:
            other = legal_move(schedule, replay, rng)  # an earlier try must have no effect
            assert in_c.try_move(*other) == replay.try_move(*other)
        if rng.random() < 0.8:
            replay.move(*move)
            in_c.move(*move)
            assert replay.timing == tried
            check(replay, schedule, profile)
        assert (in_c.order, in_c.timing, in_c.blocks_replayed) == (replay.order, replay.timing, replay.blocks_replayed)
    whole = check(replay, schedule, profile)
    assert simulate(whole.schedule, profile, Config().cache_dir) == whole


def step_of_layers(layers: int) -> str:
    """Return a step whose layers gather, run two matmuls, and reduce-scatter; tensor parallelism has another queue."""
    lines = ["h = input : 0B"]
    last = "h"
    for n in range(layers):
        lines += [
            f"g{n} = all_gather(p{n}) @dp(4) : 64MiB {130 + 7 * (n % 3)}.3us; w{n} = wait(g{n})",
            f"a{n} = extern:mm({last}, w{n}) flops=9 : 64MiB 101.7us; t{n} = all_reduce(a{n}) @tp(2) : 8MiB 31.9us",
            f"b{n} = kernel(p{n}) : 0B 3.1us; u{n} = wait(t{n}); c{n} = extern:mm(u{n}, w{n}) flops=9 : 64MiB 88.9us",
            f"r{n} = reduce_scatter(c{n}) @dp(4) : 16MiB 90.1us; s{n} = wait(r{n})",
        ]
        last = f"c{n}"
    return "\n".join(lines)


def test_a_move_in_a_long_step_replays_a_small_part_of_it():
    schedule, profile = parse(step_of_layers(120)), load_profile("h200-nvlink")
    replay, in_c, rng = Replay(schedule, profile), native(schedule, profile), random.Random(3)
    changed = 0
    for number in range(300):
        before, move = replay.timing, legal_move(schedule, replay, rng)
        replay.move(*move)
        in_c.move(*move)
        assert (in_c.timing, in_c.blocks_replayed) == (replay.timing, replay.blocks_replayed)
        changed += replay.timing != before
        if number % 10 == 0:
            check(replay, schedule, profile)
    check(replay, schedule, profile)
    assert changed > 10

    stretch = [replay.order[at] for at in range(40, 44)]
    ran: list[int] = []
    run = Machine.run

    def counted(machine: Machine, nodes: Sequence[int]) -> None:
        ran.extend(nodes)
        run(machine, nodes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "run", counted)
        replay.try_window(40, stretch)
    assert set(stretch) < set(ran)
    assert len(ran) < len(schedule.nodes) / 4


@pytest.mark.parametrize(("kernels", "gains"), [(200, 0.0), (80, 549.0), (20, 870.0)])
def test_nodes_that_wait_for_a_slow_host_are_replayed(kernels, gains):
    """A move saves time while the GPU is the limit; later the slow host is, and all or part of the gain is lost."""
    tail = "; ".join(f"k{n} = kernel(x) : 0B 1ns" for n in range(kernels))
    schedule = parse(f"a = kernel(x) : 0B 2000ns; g = all_gather(p) @dp : 0B 900ns; w = wait(g); {tail}")
    profile = DeviceProfile("slow host", launch_ns=30.0)
    replay = Replay(schedule, profile)
    before = replay.timing
    replay.move(0, 1, 1)  # the gather first, beside the kernel
    check(replay, schedule, profile)
    assert before.step_ns - replay.timing.step_ns == gains
    assert (before.exposed_ns, replay.timing.exposed_ns) == (900.0, 0.0)
    replay.move(0, 1, 1)
    check(replay, schedule, profile)
    assert replay.timing == before


def test_without_a_compiler_the_replay_runs_in_python(tmp_path, monkeypatch):
    schedule = parse(step_of_layers(3))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert isinstance(replay_of(schedule, IDEAL, tmp_path), Replay)
    assert simulate(schedule, IDEAL, tmp_path) == simulate(schedule, IDEAL)


def test_an_error_in_a_callback_from_c_is_raised(monkeypatch):
    schedule, profile = (
        parse("ag = all_gather(%p) @dp(2) : 64B 9us; k = kernel(%x) : 64B 9us; w = wait(ag)"),
        PROFILES[1],
    )
    library = library_in(Config().cache_dir)
    assert library is not None

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Costs, "mix", interrupted)
    with pytest.raises(KeyboardInterrupt):
        NativeReplay(library, schedule, profile)
    with pytest.raises(KeyboardInterrupt):
        simulated(costs_of(schedule, profile), Config().cache_dir)

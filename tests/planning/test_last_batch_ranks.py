"""A batch of another size on one rank: only that rank recompiles, and the other ranks continue undisturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import overlapc
from overlapc.agreement import rank_agreement
from overlapc.agreement.rank_agreement import peers_of, peers_spanned_by
from overlapc.estimators.profiles.profile_file import profile_path
from overlapc.report import record
from overlapc.runtime.counters import counted
from tests.caches import cache_of_rank
from tests.ranks import values_on_ranks

# Rows per rank in each step: then only rank 1's batch changes, then only rank 0's, then a batch of 1, which torch
# specializes.
ROWS = [(8, 8), (8, 5), (3, 8), (8, 1)]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))


def model(blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(blocks)))


def batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(rows, 16, generator=generator) for rows in step] for step in ROWS]


def losses_of_one_process(
    steps: list[list[Tensor]] | None = None, blocks: int = 2, whole: nn.Module | None = None
) -> list[float]:
    """Train in one process and return, for each step, the mean loss over the ranks' batches."""
    plain = whole or model(blocks)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    found = []
    for step in batches() if steps is None else steps:
        loss = sum(plain(x).square().mean() for x in step) / len(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def starts(cache: str, transport: str = "auto", device: str = "cpu") -> list[dict[str, Any]]:
    """Train with empty caches, then run the first two steps again as a process that finds all graphs on disk."""
    cold = train(cache, len(ROWS), device, transport=transport)
    torch._dynamo.reset()
    peers_of().agreed.clear()
    return [cold, train(cache, 2, device, transport=transport)]


def train(cache: str, steps: int, device: str = "cpu", **more: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch._dynamo.utils.counters.clear()
    sharded = model().to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for part in (*sharded, sharded):
        overlapc.fully_shard(part, mesh)
    options = {"rank_timeout": 20.0, "native": False, "warm_start": True, "cache_dir": cache_of_rank(cache)}
    losses, alone = steps_of(sharded, batches()[:steps], {**options, **more})
    return {
        "losses": losses,
        "alone": alone,
        "compiled": counted("graph_compiles"),
        "copied": counted("collectives_by_copies"),
    }


def steps_of(sharded: nn.Module, batches: list[list[Tensor]], options: dict[str, Any]) -> tuple[list[float], list[int]]:
    """Return each step's mean loss over ranks, and the number of graphs that this rank had compiled alone by then."""
    step = torch.compile(sharded, backend="overlapc", options=options)
    parameters = list(sharded.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses, alone = [], []
    for batch in batches:
        loss = step(batch[dist.get_rank()].to(parameters[0].device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        alone.append(counted("graphs_in_an_agreed_order"))
    return losses, alone


def test_batches_of_other_sizes_on_one_rank_train_as_in_one_process(tmp_path: Path) -> None:
    ranks = values_on_ranks(starts, 2, str(tmp_path), timeout_s=240)
    expected = losses_of_one_process()
    for cold, warm in ranks:
        assert cold["losses"] == pytest.approx(expected, rel=1e-5)
        assert warm["losses"] == cold["losses"][:2]
        assert cold["alone"][0] == warm["alone"][0] == 0
        assert (cold["compiled"] > 0, warm["compiled"]) == (True, 0)
    first, second = (cold["alone"] for cold, _ in ranks)
    assert (first[1], second[1]) == (0, 2)  # forward and backward, on the rank whose batch is smaller
    assert (first[2], second[3]) == (2, 4)


LENGTHS = [(300, 40), (7, 33), (20, 20)]  # of each rank in each step; how gradients of words are added up depends on it


def words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(128, 16), block(), nn.Linear(16, 128))


def texts() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randint(128, (length,), generator=generator) for length in step] for step in LENGTHS]


def begins_with_other_sizes(cache: str, device: str = "cpu") -> list[list[float]]:
    """Return the losses with empty caches, and those of a process that finds all graphs on disk."""
    torch.set_num_threads(1)
    losses = []
    for _ in range(2):
        torch._dynamo.reset()
        peers_of().agreed.clear()
        sharded = words().to(device)
        for part in (*sharded, sharded):
            overlapc.fully_shard(part, init_device_mesh(device, (2,)))
        options = {"rank_timeout": 20.0, "warm_start": True, "cache_dir": cache_of_rank(cache)}
        losses.append(steps_of(sharded, texts(), options)[0])
    return losses


def test_ranks_may_begin_with_batches_of_different_sizes(tmp_path: Path) -> None:
    expected = losses_of_one_process(texts(), whole=words())
    for cold, warm in values_on_ranks(begins_with_other_sizes, 2, str(tmp_path), timeout_s=240):
        assert cold == warm == pytest.approx(expected, rel=1e-5)


def evaluates_and_trains() -> list[float]:
    """Return each call's loss: an evaluation, a step, another evaluation and another step."""
    torch.set_num_threads(1)
    sharded = words()
    for part in (*sharded, sharded):
        overlapc.fully_shard(part, init_device_mesh("cpu", (2,)))
    call = torch.compile(sharded, backend="overlapc", options={"rank_timeout": 20.0})
    losses = []
    for at, texts_of_ranks in enumerate(texts() + texts()[:1]):
        with torch.set_grad_enabled(at % 2 == 1):
            loss = call(texts_of_ranks[dist.get_rank()]).square().mean()
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.item())
    return losses


def test_ranks_may_begin_with_an_evaluation_of_different_sizes() -> None:
    plain = words()
    for rank, losses in enumerate(values_on_ranks(evaluates_and_trains, 2, timeout_s=120)):
        expected = [plain(step[rank]).square().mean().item() for step in texts() + texts()[:1]]
        assert losses == pytest.approx(expected, rel=1e-5)


def arrays() -> list[float]:
    """Return the loss of arrays of different sizes, of which each trace makes another tensor, and eager's."""
    torch.set_num_threads(1)
    sharded = overlapc.fully_shard(block(), init_device_mesh("cpu", (2,)))

    def loss(array: Any) -> Tensor:
        return sharded(torch.from_numpy(array)).square().mean()

    array = torch.ones(8 if dist.get_rank() else 5, 16).numpy()
    return [torch.compile(loss, backend="overlapc")(array).item(), loss(array).item()]


def test_ranks_may_begin_with_numpy_arrays_of_different_sizes() -> None:
    for compiled, eager in values_on_ranks(arrays, 2, timeout_s=60):
        assert compiled == pytest.approx(eager, rel=1e-5)


class WithBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("part", torch.ones(3 + dist.get_rank()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.part.sum()


def buffers() -> int:
    """Return how often a step was traced again because ranks have inputs of different sizes."""
    sharded = overlapc.fully_shard(WithBuffer(), init_device_mesh("cpu", (2,)))
    torch.compile(sharded, backend="overlapc")(torch.ones(4, 16)).sum().backward()
    return counted("steps_with_different_sizes")


def test_buffers_of_different_sizes_are_compiled_for_their_sizes() -> None:
    assert values_on_ranks(buffers, 2, timeout_s=60) == [0, 0]


def accumulates(batches: list[list[Tensor]]) -> float:
    """Return the largest difference of gradients from one process, of one step with these micro-batches."""
    torch._dynamo.reset()
    plain, sharded = words(), words()
    overlapc.fully_shard(sharded, init_device_mesh("cpu", (2,)))
    compiled = torch.compile(sharded, backend="overlapc", options={"rank_timeout": 20.0})
    for last, batch in enumerate(batches):
        sharded.set_requires_gradient_sync(last == len(batches) - 1)
        compiled(batch[dist.get_rank()]).square().mean().backward()
        for x in batch:
            (plain(x).square().mean() / 2).backward()
    pairs = zip(plain.parameters(), sharded.parameters(), strict=True)
    return max(float((want.grad - got.grad.full_tensor()).abs().max()) for want, got in pairs)


def micro_batches() -> list[float]:
    """Return the errors where the second micro-batch changes on rank 1 only, after different and after equal sizes."""
    torch.set_num_threads(1)
    first, second, equal = texts()
    return [accumulates([first, [first[0], second[1]]]), accumulates([equal, [equal[0], first[1]]])]


def test_micro_batches_may_have_different_sizes() -> None:
    assert max(map(max, values_on_ranks(micro_batches, 2, timeout_s=100))) < 1e-6


def compares_two_batches() -> float:
    """Return the largest difference of gradients from one process, where the second of two forwards before the first
    backward has another size on rank 1 only."""
    torch.set_num_threads(1)
    plain, sharded = words(), words()
    overlapc.fully_shard(sharded, init_device_mesh("cpu", (2,)))
    compiled = torch.compile(sharded, backend="overlapc", options={"rank_timeout": 20.0})
    different, _, equal = texts()
    pairs = [(equal[0], equal[0]), (equal[1], different[1])]
    first, second = (compiled(x).square().mean() for x in pairs[dist.get_rank()])
    (first * second).backward()
    for pair in pairs:
        first, second = (plain(x).square().mean() for x in pair)
        (first * second / 2).backward()
    grads = zip(plain.parameters(), sharded.parameters(), strict=True)
    return max(float((want.grad - got.grad.full_tensor()).abs().max()) for want, got in grads)


def test_a_rank_alone_may_compile_before_the_first_backward() -> None:
    assert max(values_on_ranks(compares_two_batches, 2, timeout_s=60)) < 1e-6


class Named(nn.Sequential):
    def forward(self, **inputs: Tensor) -> Tensor:
        (x,) = inputs.values()
        return super().forward(x)


def two_models() -> int:
    """Return how often steps of two models were traced again because ranks have inputs of different sizes."""
    rank = dist.get_rank()
    for plain, inputs in ((model(), {"pixels": batches()[1][rank]}), (words(), {"words": texts()[0][rank]})):
        sharded = overlapc.fully_shard(Named(*plain), init_device_mesh("cpu", (2,)))
        torch.compile(sharded, backend="overlapc", options={"rank_timeout": 20.0})(**inputs).sum().backward()
    return counted("steps_with_different_sizes")


def test_a_second_model_may_begin_with_batches_of_different_sizes() -> None:
    assert values_on_ranks(two_models, 2, timeout_s=100) == [2, 2]


def evaluates_as_at_first() -> float:
    """Return the loss of an evaluation with the sizes of the first step, after a step that changed rank 0's only."""
    torch.set_num_threads(1)
    sharded = words()
    overlapc.fully_shard(sharded, init_device_mesh("cpu", (2,)))
    compiled = torch.compile(sharded, backend="overlapc", options={"rank_timeout": 20.0})
    different, _, equal = texts()
    for ranks in (equal, [different[0], equal[1]]):
        compiled(ranks[dist.get_rank()]).square().mean().backward()
    with torch.no_grad():
        return compiled(equal[dist.get_rank()]).square().mean().item()


def test_an_evaluation_may_have_a_size_that_has_changed_on_one_rank_only() -> None:
    for rank, loss in enumerate(values_on_ranks(evaluates_as_at_first, 2, timeout_s=60)):
        assert loss == pytest.approx(words()(texts()[2][rank]).square().mean().item(), rel=1e-5)


def test_a_rank_with_a_batch_of_another_size_uses_the_agreed_layout_of_copies(tmp_path: Path) -> None:
    check_layouts(values_on_ranks(starts, 2, str(tmp_path), "copy", timeout_s=240))


def check_layouts(outcomes: list[list[dict[str, Any]]]) -> None:
    """Assert the outcomes of `starts` with collectives by copies."""
    (first, first_warm), (second, second_warm) = outcomes
    assert first["losses"] == second["losses"] == pytest.approx(losses_of_one_process(), rel=1e-5)
    assert (first["alone"], second["alone"]) == ([0, 0, 2, 2], [0, 2, 2, 4])
    for cold, warm in ((first, first_warm), (second, second_warm)):
        assert warm["losses"] == cold["losses"][:2]
        assert (warm["compiled"], warm["alone"]) == (0, [0, 0])  # the cached graphs of both batches are used
        assert cold["copied"] > 0
        assert warm["copied"] > 0


class Late(nn.Module):
    """Layers of equal size, of which the first one's weight may be read once more after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor, again: bool) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y).tanh()
        return (y @ self.layers[0].weight if again else y).square().sum()


def read_again() -> tuple[list[float], list[float], int]:
    """Return losses with and without overlapc of a graph that needs slots longer than the one that it follows, and how
    many results it took out of slots."""
    torch.manual_seed(0)
    plain = Late()
    x = torch.randn(4, 16)
    expected = [plain(x, again).item() for again in (False, True)]
    mesh = init_device_mesh("cpu", (2,))
    for layer in plain.layers:
        overlapc.fully_shard(layer, mesh=mesh)
    options = {"transport": "copy", "passes": "none", "warm_start": False}
    step = torch.compile(overlapc.fully_shard(plain, mesh=mesh), backend="overlapc", options=options)
    with torch.no_grad():
        return [step(x, again).item() for again in (False, True)], expected, counted("results_taken_out_of_slots")


def test_a_graph_that_needs_slots_longer_than_the_one_it_follows_takes_results_out() -> None:
    for losses, expected, taken_out in values_on_ranks(read_again, 2):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert taken_out == 4


def accumulates_after_a_step() -> tuple[float, int, int]:
    """Run a step that reduces bfloat16 gradients, and one that reduces what two micro-batches added in float32.

    Return the norm of the sum of all gradients, how many graphs of the second step followed an earlier one, and how
    many collectives copies carried.
    """
    sharded = model()
    mesh = init_device_mesh("cpu", (2,))
    for part in (*sharded, sharded):
        overlapc.fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    options = {"transport": "copy", "warm_start": False, "rank_timeout": 20.0}
    step = torch.compile(sharded, backend="overlapc", options=options)
    x = batches()[0][dist.get_rank()]
    step(x).square().mean().backward()
    before = counted("graphs_in_an_agreed_order")
    with overlapc.no_sync(sharded):
        step(x).square().mean().backward()
    step(x).square().mean().backward()
    norm = nn.utils.get_total_norm([param.grad for param in sharded.parameters()]).full_tensor()
    return norm.item(), counted("graphs_in_an_agreed_order") - before, counted("collectives_by_copies")


def test_a_step_that_reduces_in_another_dtype_than_an_earlier_one_follows_it():
    plain = model()
    sum(3 * plain(x).square().mean() / 2 for x in batches()[0]).backward()
    expected = nn.utils.get_total_norm([param.grad for param in plain.parameters()]).item()
    for norm, followed, copied in values_on_ranks(accumulates_after_a_step, 2):
        assert norm == pytest.approx(expected, rel=0.01)
        assert followed > 0
        assert copied > 0


class Sliced(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[1:])


def parts_of_tensors() -> list[list[Tensor]]:
    """Return the ranks' batches, of which only rank 1's have a storage offset, and in the second step gaps."""
    generator = torch.Generator().manual_seed(3)
    rows, columns = torch.randn(2, 8, 16, generator=generator), torch.randn(8, 48, generator=generator)
    steps = [list(rows), [columns[:, :16].contiguous(), columns[:, 20:36]]]
    for x in (x for step in steps for x in step):
        torch._dynamo.mark_dynamic(x, 0)
    return steps


def train_on_parts() -> list[float]:
    torch.set_num_threads(1)
    losses = []
    for step in parts_of_tensors():
        torch._dynamo.reset()
        sharded = overlapc.fully_shard(Sliced(*model()), init_device_mesh("cpu", (2,)))
        losses += steps_of(sharded, [step], {"rank_timeout": 20.0, "warm_start": False})[0]
    return losses


def test_batches_may_lie_in_memory_differently_on_each_rank() -> None:
    expected = [losses_of_one_process([[x[1:] for x in step]])[0] for step in parts_of_tensors()]
    for losses in values_on_ranks(train_on_parts, 2, timeout_s=120):
        assert losses == pytest.approx(expected, rel=1e-5)


class Broken(nn.Sequential):
    """Two compiled functions: the backward of the first is compiled after that of the second."""

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        torch._dynamo.graph_break()
        return self[1](x)


def after_a_graph_break() -> tuple[list[float], list[int], list[int]]:
    """Return losses, the number of graphs that this rank had compiled alone after each step, and how many functions
    ranks have agreed on before a reset, and for the next compilation behind it."""
    torch.set_num_threads(1)
    sharded = Broken(*model())
    for part in (*sharded, sharded):
        overlapc.fully_shard(part, init_device_mesh("cpu", (2,)))
    losses, alone = steps_of(sharded, batches()[:2], {"rank_timeout": 20.0, "native": False, "warm_start": False})
    agreed = [len(peers_of().agreed)]
    torch._dynamo.reset()
    torch.compile(communicates_activations, backend="overlapc")(torch.ones(4))
    return losses, alone, [*agreed, len(peers_of().agreed)]


def test_a_backward_compiled_after_a_later_forward_is_no_reset() -> None:
    first, second = values_on_ranks(after_a_graph_break, 2, timeout_s=120)
    assert first[0] == second[0] == pytest.approx(losses_of_one_process(batches()[:2]), rel=1e-5)
    assert (first[1:], second[1:]) == (([0, 0], [4, 1]), ([0, 4], [4, 1]))


def profile_in(folder: str, tensor_ns: float) -> str:
    """Write this rank's profile, in which one more tensor adds this time to a collective; return its path."""
    profile = json.loads(profile_path("h200-nvlink").read_text())
    profile["quantities"]["coalesced_tensor_ns"]["value"] = tensor_ns
    path = Path(folder, f"{dist.get_rank()}.json")
    path.write_text(json.dumps(profile))
    return str(path)


def with_own_profiles(folder: str) -> list[float]:
    """Train where hosts have measured other times: by its own, rank 1 would pack no tensors together."""
    torch.set_num_threads(1)
    sharded = overlapc.fully_shard(model(), init_device_mesh("cpu", (2,)))
    options = {"rank_timeout": 20.0, "native": False, "warm_start": False, "transport": "nccl"}
    options["profile"] = profile_in(folder, 100.0 if dist.get_rank() else 40_000.0)
    losses, _ = steps_of(sharded, batches()[:2], options)
    return losses


def test_a_rank_that_compiles_alone_packs_tensors_as_all_ranks_agreed(tmp_path: Path) -> None:
    for losses in values_on_ranks(with_own_profiles, 2, str(tmp_path), timeout_s=120):
        assert losses == pytest.approx(losses_of_one_process(batches()[:2]), rel=1e-5)


def gathered(*shards: Tensor) -> list[Tensor]:
    return [funcol.all_gather_tensor(shard.contiguous(), 0, dist.group.WORLD) + 1 for shard in shards]


def other_strides(folder: str) -> list[bool]:
    """Gather small tensors, which are packed together; then two of them transposed, which are not."""
    options = {"rank_timeout": 20.0, "warm_start": False, "profile": profile_in(folder, 40_000.0)}
    call = torch.compile(gathered, backend="overlapc", options=options)
    shards = list(torch.randn(6, 4, 4))
    calls = [shards, [*shards[:4], shards[4].t(), shards[5].t()]]
    return [all(map(torch.equal, call(*each), gathered(*each))) for each in calls]


def test_a_graph_follows_none_that_packs_other_tensors(tmp_path: Path) -> None:
    assert values_on_ranks(other_strides, 2, str(tmp_path), timeout_s=60) == [[True, True]] * 2


# Rows of four ranks in two replica groups, each of which holds the whole model.
ROWS_OF_FOUR = [(8, 8, 8, 8), (8, 8, 8, 5), (8, 3, 8, 8)]


def batches_of_four() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(rows, 16, generator=generator) for rows in step] for step in ROWS_OF_FOUR]


def with_replicas(cache: str) -> tuple[list[float], list[int]]:
    """Train with HSDP, parameters sharded over two ranks and replicated twice, from the first step's cached graphs."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"rank_timeout": 20.0, "native": False, "cache_dir": cache_of_rank(cache)}
    steps_of(overlapc.fully_shard(model(), mesh=mesh), batches_of_four()[:1], options)
    torch._dynamo.reset()
    rank_agreement._process = rank_agreement._Process()  # as another job
    return steps_of(overlapc.fully_shard(model(), mesh=mesh), batches_of_four(), options)


def test_a_batch_of_another_size_on_one_hsdp_rank_trains_as_in_one_process(tmp_path: Path) -> None:
    ranks = values_on_ranks(with_replicas, 4, str(tmp_path), timeout_s=240)
    expected = losses_of_one_process(batches_of_four())
    for losses, _ in ranks:
        assert losses == pytest.approx(expected, rel=1e-5)
    assert [alone for _, alone in ranks] == [[0, 0, 0], [0, 0, 2], [0, 0, 0], [0, 2, 2]]


# Rows of two tensor-parallel groups in each step; the ranks of a group have the same batch.
ROWS_OF_GROUPS = [(8, 8), (8, 5), (3, 8)]


def communicates_on_two_axes(x: Tensor, shards: list[Tensor], data: DeviceMesh, tensor: DeviceMesh) -> Tensor:
    for shard in shards:
        weight = funcol.all_gather_tensor(shard, 0, data)
        x = funcol.all_reduce(x @ weight, "sum", tensor).tanh()
    return x


def small_groups() -> tuple[list[float], list[int], int]:
    """Return each step's error against eager, each step's number of graphs compiled in an agreed order, and the number
    of collectives by copies."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shards = [torch.randn(8, 16, generator=torch.Generator().manual_seed(at)) for at in range(2)]
    options = {"rank_timeout": 20.0, "native": False, "transport": "copy"}
    step = torch.compile(communicates_on_two_axes, backend="overlapc", options=options, dynamic=False)
    errors, alone = [], []
    for rows in ROWS_OF_GROUPS:
        x = torch.ones(rows[mesh["dp"].get_local_rank()], 16)
        results = step(x, shards, mesh["dp"], mesh["tp"])
        errors.append((results - communicates_on_two_axes(x, shards, mesh["dp"], mesh["tp"])).abs().max().item())
        alone.append(counted("graphs_in_an_agreed_order"))
    return errors, alone, counted("collectives_by_copies")


def test_ranks_whose_collectives_change_compile_together_and_others_continue() -> None:
    ranks = values_on_ranks(small_groups, 4, timeout_s=240)
    assert all(max(errors) < 1e-5 for errors, _, _ in ranks)
    assert [alone for _, alone, _ in ranks] == [[0, 0, 1], [0, 0, 1], [0, 1, 1], [0, 1, 1]]
    # All collectives of the first graph are copies; in the second graph only the gathers, whose sizes are unchanged.
    assert [copied for _, _, copied in ranks] == [6 + 2] * 4


def permuted_mesh() -> tuple[bool, tuple[int, ...]]:
    """Return whether a step on two axes equals eager's, and the ranks that compile it together."""
    mesh = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("dp", "tp"))
    x, shards = torch.ones(8, 16), [torch.full((8, 16), 0.1)] * 2
    options = {"rank_timeout": 20.0, "warm_start": False}
    step = torch.compile(communicates_on_two_axes, backend="overlapc", options=options)
    equal = torch.allclose(
        step(x, shards, mesh["dp"], mesh["tp"]), communicates_on_two_axes(x, shards, mesh["dp"], mesh["tp"])
    )
    groups = [tuple(dist.get_process_group_ranks(mesh[axis].get_group())) for axis in ("dp", "tp")]
    return equal, peers_spanned_by(groups, 20.0).meetings.ranks


def test_ranks_of_a_mesh_in_any_order_compile_together() -> None:
    assert values_on_ranks(permuted_mesh, 4, timeout_s=60) == [(True, (0, 1, 2, 3))] * 4


def other_sizes_from_the_first_step(transport: str) -> list[float]:
    """Return each step's largest error against eager; the groups are pairs of ranks that are no mesh."""
    torch.set_num_threads(1)
    pairs = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    first = dist.get_rank() in (0, 3)
    pair = pairs[0] if first else pairs[1]

    def reduced(x: Tensor, y: Tensor) -> Tensor:
        means = funcol.all_reduce(x @ x.T, "avg", pair)
        return means.tanh() @ y + funcol.all_reduce(y.sum(), "sum", dist.group.WORLD)

    options = {"rank_timeout": 20.0, "transport": transport, "warm_start": False}
    compiled = torch.compile(reduced, backend="overlapc", options=options, dynamic=False)
    steps = [(torch.randn(rows, 6), torch.randn(rows, 1)) for rows in ((8, 4) if first else (5, 3))]
    return [float((compiled(x, y) - reduced(x, y)).abs().max()) for x, y in steps]


@pytest.mark.parametrize("transport", ["nccl", "copy"])
def test_groups_may_have_other_sizes_than_each_other_from_the_first_step(transport: str) -> None:
    for errors in values_on_ranks(other_sizes_from_the_first_step, 4, transport, timeout_s=120):
        assert max(errors) < 1e-5


def batches_of_groups() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(rows, 16, generator=generator) for rows in step] for step in ROWS_OF_GROUPS]


def with_tensor_parallelism() -> dict[str, tuple[list[float], list[int], int]]:
    """Return, by transport, the losses, numbers of graphs compiled in an agreed order, and collectives by copies."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batches = [[step[group] for group in (0, 0, 1, 1)] for step in batches_of_groups()]
    seen = {}
    for transport, steps in (("nccl", batches[:2]), ("copy", batches)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        sharded = model(blocks=1)
        parallelize_module(sharded[0], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        overlapc.fully_shard(sharded, mesh["dp"])
        losses, alone = steps_of(sharded, steps, {"rank_timeout": 20.0, "native": False, "transport": transport})
        seen[transport] = losses, alone, counted("collectives_by_copies")
    return seen


@pytest.mark.slow
def test_a_batch_of_another_size_in_one_tensor_parallel_group_trains_as_in_one_process() -> None:
    """The two ranks of that group compile together and keep the order of the collectives that they share with the other
    group, which continues with its graph."""
    ranks = values_on_ranks(with_tensor_parallelism, 4, timeout_s=240)
    expected = losses_of_one_process(batches_of_groups(), blocks=1)
    for rank in ranks:
        for transport in ("nccl", "copy"):
            losses, _, copied = rank[transport]
            assert losses == pytest.approx(expected[: len(losses)], rel=1e-5)
            assert (copied > 0) == (transport == "copy")
    first, _, second, _ = (rank["copy"][1] for rank in ranks)
    assert (first, second) == ([0, 0, 2], [0, 2, 2])  # forward and backward, in the group whose batch is smaller
    for rank, other in ((0, 1), (2, 3)):
        assert ranks[rank] == ranks[other]


class Scaled(nn.Sequential):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.factor)


def follows_a_graph_that_followed() -> tuple[list[int], list[dict[str, str]]]:
    """Train with a smaller batch on the second tensor-parallel group, then with another factor there; both recompile.

    Return the number of graphs in an agreed order after each step, and the transport of each group in each forward.
    """
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = Scaled(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    parallelize_module(whole, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sharded = overlapc.fully_shard(whole, mesh["dp"])
    options = {"rank_timeout": 20.0, "native": False, "transport": "copy", "warm_start": False}
    step = torch.compile(sharded, backend="overlapc", options=options, dynamic=False)  # copies need known sizes
    second = mesh["dp"].get_local_rank() == 1
    followed = []
    for rows, factor in ((8, 1.0), (5, 1.0), (5, 2.0)):
        sharded.factor = factor if second else 1.0
        step(torch.ones(rows if second else 8, 16)).square().mean().backward()
        followed.append(counted("graphs_in_an_agreed_order"))
    forwards = record.report_of_process().steps[-1].graphs[::2]
    return followed, [{row.group: row.via for row in graph.collectives} for graph in forwards]


@pytest.mark.slow
def test_a_graph_that_follows_one_whose_group_uses_the_library_uses_it_too() -> None:
    ranks = values_on_ranks(follows_a_graph_that_followed, 4, timeout_s=240)
    both, by_library = {"dp": "copy", "tp": "copy"}, {"dp": "copy", "tp": ""}
    assert ranks == [([0, 0, 0], [both])] * 2 + [([0, 2, 4], [both, by_library, by_library])] * 2


class Shifted(nn.Linear):
    """Backward computes the sum again if sizes are fixed, so it gathers the shift before the weight."""

    def __init__(self) -> None:
        super().__init__(16, 16, bias=False)
        self.first, self.shift = nn.Parameter(torch.eye(16)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        low = (x.bfloat16() @ self.first.bfloat16()).tanh()
        return super().forward(low.float() + self.shift.tanh()).tanh()


def two_shifted() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Shifted(), Shifted())


def gathers_in_another_order() -> tuple[list[float], list[int]]:
    torch.set_num_threads(1)
    sharded = two_shifted()
    for part in (*sharded, sharded):
        overlapc.fully_shard(part, init_device_mesh("cpu", (2,)))
    return steps_of(sharded, batches()[:2], {"rank_timeout": 20.0, "native": False, "warm_start": False})


def test_a_rank_alone_may_gather_parameters_in_another_order_in_backward() -> None:
    (losses, _), (others, alone) = values_on_ranks(gathers_in_another_order, 2, timeout_s=100)
    assert losses == others == pytest.approx(losses_of_one_process(batches()[:2], whole=two_shifted()), rel=1e-3)
    assert alone == [0, 2]


def communicates_activations(x: Tensor) -> Tensor:
    return funcol.all_reduce(x.sin(), "sum", dist.group.WORLD).cos()


def turned_batches(transport: str, ranks: int) -> tuple[list[bool], list[str]]:
    """Communicate a batch of 4 x 6 and then, on the first `ranks` ranks, one of 6 x 4: Dynamo compiles again there, for
    symbolic sizes.

    Return whether each result equals eager's, and the transport in all graphs.
    """
    options = {"rank_timeout": 20.0, "transport": transport, "warm_start": False}
    call = torch.compile(communicates_activations, backend="overlapc", options=options)
    with torch.no_grad():
        batches = (torch.ones(4, 6), torch.ones(6, 4) if dist.get_rank() < ranks else torch.ones(4, 6))
        equal = [torch.allclose(call(x), communicates_activations(x)) for x in batches]
    graphs = record.report_of_process().steps[-1].graphs
    return equal, [row.via for graph in graphs for row in graph.collectives]


def test_a_graph_of_symbolic_sizes_follows_no_copies_of_a_graph_of_fixed_sizes_that_moved_as_many_bytes() -> None:
    equal, transports = values_on_ranks(turned_batches, 2, "copy", 2, timeout_s=60)[0]
    assert equal == [True, True]
    assert transports == ["copy", "copy", ""], "an exchange and a gather, then an all-reduce of symbolic size"


def test_one_rank_alone_compiles_for_symbolic_sizes_where_the_library_moves_as_many_bytes() -> None:
    first, second = values_on_ranks(turned_batches, 2, "nccl", 1, timeout_s=60)
    assert (first, second) == (([True, True], ["", ""]), ([True, True], [""]))


def two_reductions(x: Tensor, reduction: str) -> Tensor:
    return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) - funcol.all_reduce(x + 1, reduction, dist.group.WORLD)


def other_reductions() -> list[bool]:
    call = torch.compile(two_reductions, backend="overlapc", options={"rank_timeout": 20.0, "warm_start": False})
    x = torch.arange(4.0) * dist.get_rank()
    return [torch.allclose(call(x, each), two_reductions(x, each)) for each in ("sum", "max", "sum")]


def test_a_graph_follows_none_with_other_reductions() -> None:
    assert values_on_ranks(other_reductions, 2, timeout_s=60) == [[True] * 3] * 2


def more_sizes_than_dynamo_compiles() -> tuple[list[float], int]:
    """Return the losses of a batch that changes on rank 0 only, and this rank's number of compiled graphs."""
    torch.set_num_threads(1)
    sharded = model(blocks=1)
    overlapc.fully_shard(sharded, init_device_mesh("cpu", (2,)))
    compiled = torch.compile(sharded, backend="overlapc", options={"rank_timeout": 20.0}, dynamic=False)
    losses = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (8, 7, 6, 5):
            loss = compiled(torch.ones(8 if dist.get_rank() else rows, 16)).square().mean()
            loss.backward()
            losses.append(loss.item())
    return losses, counted("graphs")


def test_a_rank_compiles_more_graphs_than_dynamos_limit_while_others_run_theirs() -> None:
    expected = model(blocks=1)(torch.ones(8, 16)).square().mean().item()
    (first, compiled), (second, _) = values_on_ranks(more_sizes_than_dynamo_compiles, 2, timeout_s=60)
    assert first + second == pytest.approx([expected] * 8, rel=1e-5)
    assert compiled == 2 * 4


def more_graphs_than_dynamo_stores() -> float:
    def total(x: Tensor) -> Tensor:
        return funcol.all_reduce(x.sum(), "sum", dist.group.WORLD)

    compiled = torch.compile(total, backend="overlapc", options={"rank_timeout": 20.0}, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=2):
        found = compiled(torch.ones(2)) + compiled(torch.ones(3))
        with pytest.raises(overlapc.CompileError, match="pad inputs to fewer sizes"):
            compiled(torch.ones(4))
    return found.item()


def test_a_function_that_communicates_and_that_dynamo_would_run_eagerly_for_good_is_an_error() -> None:
    assert values_on_ranks(more_graphs_than_dynamo_stores, 2, timeout_s=60) == [10.0, 10.0]


def other_sizes_of_collectives() -> str:
    options = {"rank_timeout": 10.0, "native": False}
    step = torch.compile(communicates_activations, backend="overlapc", options=options, dynamic=False)
    step(torch.ones(4))
    error = ""
    if dist.get_rank() == 0:
        with pytest.raises(overlapc.RanksDisagree) as caught:
            step(torch.ones(3))
        error = str(caught.value)
    dist.barrier()
    return error


def test_a_rank_that_alone_needs_other_collectives_gets_an_error_with_advice() -> None:
    error, _ = values_on_ranks(other_sizes_of_collectives, 2)
    assert "rank 1 did not reach compilation 2 (inference), graph within 10 s" in error
    assert "dynamic=True" in error
    assert "drop_last" in error


# Rows that each rank (row) sends to each other one, of experts' tokens; then only ranks 0 and 1 exchange other numbers.
TOKENS = [[[1, 2, 1], [1, 1, 1], [2, 1, 3]], [[1, 3, 1], [1, 1, 1], [2, 1, 3]]]


def dispatched(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    tokens = funcol.all_to_all_single(x.sin(), received, sent, dist.group.WORLD)
    return funcol.all_to_all_single(tokens.square(), sent, received, dist.group.WORLD) + x


def uneven_parts() -> tuple[list[bool], list[int]]:
    options = {"rank_timeout": 20.0, "native": False, "warm_start": False}
    call = torch.compile(dispatched, backend="overlapc", options=options, dynamic=False)
    rank, equal, alone = dist.get_rank(), [], []
    for tokens in TOKENS:
        sent, received = tokens[rank], [row[rank] for row in tokens]
        x = torch.arange(2.0 * sum(sent)).view(-1, 2) + rank
        equal.append(torch.allclose(call(x, sent, received), x.sin().square() + x))
        alone.append(counted("graphs_in_an_agreed_order"))
    return equal, alone


def test_parts_of_an_all_to_all_may_differ_between_ranks_and_change_on_some() -> None:
    ranks = values_on_ranks(uneven_parts, 3, timeout_s=60)
    assert ranks == [([True, True], [0, 1]), ([True, True], [0, 1]), ([True, True], [0, 0])]


def depends_on_a_flag(x: Tensor, flag: bool) -> Tensor:
    """Two reductions; the second is launched first, as its input is ready first, unless it depends on the other one."""
    far = x
    for _ in range(20):
        far = torch.mm(far, x).tanh()
    first = funcol.all_reduce(far, "sum", dist.group.WORLD)
    second = funcol.all_reduce(x + first if flag else x.sin(), "sum", dist.group.WORLD)
    return first + second


def another_order() -> tuple[str, list[str]]:
    step = torch.compile(depends_on_a_flag, backend="overlapc", options={"native": False})
    x = torch.eye(16)
    assert torch.allclose(step(x, False), depends_on_a_flag(x, False))
    order = [row.name for row in record.report_of_process().steps[-1].graphs[-1].collectives]
    error = ""
    if dist.get_rank() == 0:
        with pytest.raises(overlapc.CompileError) as caught:
            step(x, True)
        error = str(caught.value)
    dist.barrier()
    return error, order


def test_a_graph_that_alone_needs_another_order_is_an_error() -> None:
    (error, order), _ = values_on_ranks(another_order, 2)
    assert order == ["all_reduce_1", "all_reduce"]
    assert "must launch their collectives in the same order. This graph's data dependences make that order" in error
    assert "reorder_collectives" in error

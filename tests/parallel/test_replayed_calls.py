"""Equal blocks that are given an object made in the same trace, as a cache, are traced once but for its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.test_replayed_blocks import DIM, MEMORY, Block, Model, capture, once, sharded

pytestmark = pytest.mark.usefixtures("world", "fresh_dynamo")


class Store:
    """Keeps a tensor of each block, as transformers' caches do."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self.last = -1

    def update(self, x: Tensor, at: int, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        self.kept[at] = x * 2
        self.last = at
        return self.kept[at], x.relu()

    def nothing(self, at: int) -> tuple[()]:
        self.last = at
        return ()


class Keeping(Block):
    index = 0

    def forward(self, x: Tensor, store: Any, *others: Any, **named: Any) -> Any:
        y = self.up(x)
        doubled, positive = store.update(y, self.index)
        return x + doubled + positive


class Given(Model):
    """Makes a store, gives it to all blocks, and returns what depends on it."""

    def __init__(self, block: type[Block] = Keeping, make: Callable[[], Any] = Store) -> None:
        super().__init__(block)
        self.make = make
        for at, layer in enumerate(self.layers):
            layer.index = at

    def run(self, x: Tensor) -> Tensor:
        store = self.make()
        for layer in self.layers:
            x = layer(x, store)
        return x + store.last + sum(each.sum() for each in store.kept.values())


def test_blocks_that_keep_tensors_in_an_object_are_traced_once():
    once(sharded(Given()), 3)


class Naming(Keeping):
    def place(self) -> int:
        return self.index

    def forward(self, x: Tensor, store: Any, *others: Any, **named: Any) -> Any:
        kept, _ = store.update(x, self.index, None, (x, 1.5), options={"x": x, "scale": self.scale})
        store.nothing(self.index)
        kept, more = store.update(self.norm(kept), at=self.place())
        return self.up(more)


class Computing(Naming):
    def place(self) -> int:
        return self.index + 0 * self.calls if self.training else 0


def test_several_calls_with_nested_arguments_are_traced_for_each_block():
    once(sharded(Given(Naming)), 3)


class Before(Keeping):
    def forward(self, x: Tensor, store: Any, *others: Any, **named: Any) -> Any:
        return super().forward(x * self.index, store)


class After(Keeping):
    def forward(self, x: Tensor, store: Any, *others: Any, **named: Any) -> Any:
        return super().forward(x, store) * self.index


class Held(Keeping):
    def forward(self, x: Tensor, store: Any, *others: Any, **named: Any) -> Any:
        at = self.index
        doubled, _ = store.update(x, at)
        return self.up(doubled) if at < 2 else doubled


class State(Keeping):
    def forward(self, x: Tensor, store: Any, *others: Any, **named: Any) -> Any:
        return super().forward(x + store.last, store)


class Nested(Keeping):
    def forward(self, x: Tensor, store: Any, *others: Any, **named: Any) -> Any:
        store.update(x, self.index)
        return self.up(store.kept[self.index])


class Writing(Keeping):
    def forward(self, x: Tensor, store: Any, *others: Any, **named: Any) -> Any:
        store.last = self.index
        return super().forward(x, store)


@pytest.mark.parametrize("block", [Computing, Before, After, Held, State, Nested, Writing])
def test_blocks_that_depend_on_their_number_or_on_the_objects_state_are_each_traced(block: type[Block]):
    once(sharded(Given(block)), 0)


class Growing(Store):
    """Returns a result of another shape for each block."""

    def update(self, x: Tensor, at: int, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        self.kept[at] = torch.cat([x, *self.kept.values()])
        self.last = at
        return self.kept[at].sum(0), x.relu()


class Counting(Store):
    """Keeps a tensor of another dtype for the second block."""

    def update(self, x: Tensor, at: int, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        self.kept[at] = x.double() if at == 1 else x
        return x * 2, x + 1


class Repeating(Store):
    """Returns one tensor twice for the first block."""

    def update(self, x: Tensor, at: int, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        self.kept[at], self.last = x * 2, at
        more = x * 3
        return (more, more) if at == 0 else (self.kept[at], more)


class Returning(Store):
    """Returns what it is given."""

    def update(self, x: Tensor, at: int, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        self.kept[at], self.last = x, at
        return x, x.relu()


def test_a_method_that_returns_what_it_is_given_makes_dynamo_trace_each():
    once(sharded(Given(make=Returning)), 0)


class Telling(Store):
    """Also changes an object that existed before."""

    def update(self, x: Tensor, at: int, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        MEMORY.at = at
        return super().update(x, at)


class Told(Keeping):
    def forward(self, x: Tensor, store: Any, *others: Any, **named: Any) -> Any:
        return super().forward(x, store) * (1.0 + MEMORY.at)


def test_a_method_that_changes_something_else_is_noticed():
    once(sharded(Given(Told, Telling)), 0)


@pytest.mark.parametrize("make", [Growing, Counting, Repeating])
def test_a_method_that_does_something_else_for_another_block_makes_dynamo_trace_each(make: Callable[[], Any]):
    once(sharded(Given(make=make)), 0)


def test_an_object_from_outside_of_the_trace_is_not_given_to_copies():
    outside = Store()

    class Global(Given):
        def run(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, outside)
            return x

    once(sharded(Global()), 0)


def test_a_later_change_of_a_number_is_noticed():
    model = sharded(Given())
    x = torch.randn(2, DIM, requires_grad=True)

    def run(compiled: Any) -> None:
        compiled(x)
        model.layers[2].index = 7
        compiled(x)

    graphs, _ = capture(model, True, run)
    assert len(graphs) == 2
    assert graphs[1] == capture(model, False, lambda compiled: compiled(x))[0][0]

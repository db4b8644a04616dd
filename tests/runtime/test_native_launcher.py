"""The C launcher, tested with a fake CUDA driver that records launches."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch

from overlapc.runtime import native_launcher as native
from tests.runtime.recording_driver import Driver


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Driver]:
    folder = tmp_path_factory.mktemp("driver")
    driver = Driver(folder)
    make = native.launcher_type(folder, str(driver.path))
    assert make is not None
    return make, driver


@pytest.fixture
def driver(made: tuple[Any, Driver]) -> Iterator[Driver]:
    made[1].library.reset(4)
    yield made[1]
    made[1].library.reset(4)


class Fallback:
    """The fallback that the launcher calls when it cannot launch."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *tensors: Any) -> str:
        self.calls.append(tensors)
        return "fell back"


def launcher(make: Any, otherwise: Any, stages: Any = ((11, 5, 128, 64),), scratch: Any = (), pointers: int = 2) -> Any:
    return make(
        name="kernel",
        stages=stages,
        pointers=pointers,
        scratch=scratch,
        empty=lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        data_ptr=torch.Tensor.data_ptr,
        stream_of=lambda device: 1000 + device,
        device=3,
        otherwise=otherwise,
    )


def test_a_call_is_a_launch_of_every_stage(made, driver: Driver):
    otherwise = Fallback()
    launch = launcher(made[0], otherwise, stages=((11, 5, 128, 64), (12, 0, 32, 0), (13, 1, 256, 0)))
    a, b = torch.zeros(8), torch.zeros(8)
    assert launch(a, b) is None
    pointers = [a.data_ptr(), b.data_ptr(), 0, 0]
    assert [row[:9] for row in driver.launches()] == [
        [11, 1003, 5, 128, 64, *pointers],  # stage 12 has a grid of 0 programs and is not launched
        [13, 1003, 1, 256, 0, *pointers],
    ]
    assert not otherwise.calls


def test_scratch_memory_comes_after_the_tensors(made, driver: Driver):
    driver.library.reset(5)
    sizes: list[Any] = []
    launch = made[0](
        name="kernel",
        stages=((11, 5, 128, 0),),
        pointers=2,
        scratch=(((4,), (1,), torch.float64),),
        empty=lambda *form: sizes.append(form) or memory,
        data_ptr=torch.Tensor.data_ptr,
        stream_of=lambda device: device,
        device=0,
        otherwise=Fallback(),
    )
    memory, a, b = torch.zeros(4, dtype=torch.float64), torch.zeros(8), torch.zeros(8)
    launch(a, b)
    assert sizes == [((4,), (1,), torch.float64)]
    assert driver.launches()[0][5:10] == [a.data_ptr(), b.data_ptr(), memory.data_ptr(), 0, 0]


def test_unaligned_tensors_and_other_devices_use_the_fallback(made, driver: Driver):
    otherwise = Fallback()
    launch = launcher(made[0], otherwise)
    a, b = torch.zeros(9), torch.zeros(8)
    assert launch(a[1:], b) == "fell back"
    assert [each.data_ptr() for each in otherwise.calls[0]] == [a.data_ptr() + 4, b.data_ptr()]
    driver.library.move_away()  # another device is current
    assert launch(a, b) == "fell back"
    assert not driver.launches()


def test_errors_are_raised_to_the_caller(made, driver: Driver):
    launch = launcher(made[0], Fallback())
    a, b = torch.zeros(8), torch.zeros(8)
    with pytest.raises(TypeError, match="kernel takes 2 tensors, not 1"):
        launch(a)
    with pytest.raises(TypeError, match="takes 2 tensors"):
        launch(a, b=b)
    with pytest.raises(TypeError):
        launch(a, 3)
    driver.library.fail()
    with pytest.raises(RuntimeError, match="launch of kernel: CUDA error 700: made to fail"):
        launch(a, b)

    def no_memory(*form: Any) -> None:
        raise MemoryError("no memory")

    launch = made[0]("kernel", ((11, 1, 32, 0),), 1, (((4,), (1,), torch.int8),), no_memory,
                              torch.Tensor.data_ptr, int, 0, Fallback())  # fmt: skip
    with pytest.raises(MemoryError, match="no memory"):
        launch(a)
    for wrong in ((1,), ((1, 2, 3),)):
        with pytest.raises(TypeError):
            launcher(made[0], Fallback(), stages=wrong)
    with pytest.raises(TypeError, match="scratch is"):
        launcher(made[0], Fallback(), scratch=((4,),))


def test_a_launcher_and_its_owner_are_collected(made, driver: Driver):
    class Owner:
        def __init__(self) -> None:
            self.launch = launcher(made[0], self.other)

        def other(self, *tensors: Any) -> None:
            pass

    gc.freeze()  # what other tests left takes many seconds to scan
    try:
        owner = Owner()
        held = weakref.ref(owner)
        del owner
        gc.collect()
        assert held() is None
    finally:
        gc.unfreeze()


def test_without_a_driver_there_is_no_launcher(tmp_path: Path):
    with TestCase().assertLogs("overlapc", "INFO") as logs:
        assert native.launcher_type(tmp_path, str(tmp_path / "none.so")) is None
    assert "through torch" in logs.output[0]


def test_a_library_that_is_no_driver_is_refused(tmp_path: Path):
    with TestCase().assertLogs("overlapc", "INFO") as logs:
        assert native.launcher_type(tmp_path, "libc.so.6") is None
    assert "libc.so.6 is not a CUDA driver" in logs.output[0]


def test_without_a_working_compiler_there_is_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "false")
    assert native.launcher_type(tmp_path / "other") is None

"""copy_stream.c, tested with a fake CUDA driver that records calls."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlapc.runtime.copies import command_queues
from overlapc.runtime.copies.command_queues import PackedCommands
from overlapc.runtime.copies.commands import Copy, Post, Until
from overlapc.runtime.native_launcher import DRIVER
from overlapc.runtime.toolchain import find_compiler

SOURCE = """
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef unsigned long number;
struct Operation { uint32_t operation; uint64_t address, value; uint32_t flags; uint64_t alias, padding; };
char lines[8192], fails[64];
number events, now = 1;
static int note(const char *call, const char *form, ...) {
  va_list list;
  va_start(list, form);
  size_t used = strlen(lines);
  vsnprintf(lines + used, sizeof lines - used, form, list);
  return *call && !strcmp(call, fails) ? 700 : 0;
}
extern "C" {
const char *written() { return lines; }
void begin(const char *failing, number context) { *lines = 0; events = 0; strcpy(fails, failing); now = context; }
int cuMemcpyAsync(number to, number of, size_t bytes, number at) {
  return note("cuMemcpyAsync", "copy %lu to %lu: %zu on %lu\\n", of, to, bytes, at);
}
int cuStreamBatchMemOp_v2(number at, unsigned count, Operation *each, unsigned flags) {
  for (unsigned k = 0; k < count; ++k)
    note("", "%s %lu: %lu on %lu%s\\n", each[k].operation == 1 ? "wait for" : "set", each[k].address, each[k].value, at,
         each[k].flags || flags ? " with flags" : "");
  return note("cuStreamBatchMemOp", "these %u\\n", count);
}
int cuStreamWaitEvent(number at, number event, unsigned) {
  return note("cuStreamWaitEvent", "%lu after event %lu\\n", at, event);
}
int cuEventCreate(number *event, unsigned flags) { *event = ++events; return flags != 2; }
int cuEventRecord(number event, number at) { return note("cuEventRecord", "event %lu on %lu\\n", event, at); }
int cuEventQuery(number event) { return event == 2 ? 600 : note("cuEventQuery", ""); }
int cuEventDestroy_v2(number event) { return note("", "no event %lu\\n", event); }
int cuCtxGetCurrent(number *found) { *found = now; return 0; }
int cuCtxPushCurrent_v2(number found) { return note("cuCtxPushCurrent", "context %lu\\n", found); }
int cuCtxPopCurrent_v2(number *) { return note("", "context before\\n"); }
int cuStreamGetCtx(number, number *found) { *found = 1; return 0; }
}
"""
MAIN, OWN, CURRENT = 11, 12, 13  # streams


class Driver:
    """The fake driver, and the calls since `begin`."""

    def __init__(self, folder: Path) -> None:
        source, self.path = folder / "driver.cpp", folder / "libdriver.so"
        source.write_text(SOURCE)
        subprocess.run([*find_compiler().command, "-shared", "-fPIC", "-o", str(self.path), str(source)], check=True)
        self.library = ctypes.CDLL(str(self.path))
        self.library.written.restype = ctypes.c_char_p

    def begin(self, failing: str = "", context: int = 1) -> None:
        self.library.begin(failing.encode(), ctypes.c_ulong(context))

    @property
    def asked(self) -> list[str]:
        return self.library.written().decode().splitlines()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Driver]:
    folder = tmp_path_factory.mktemp("driver")
    driver = Driver(folder)
    return command_queues._native(folder, str(driver.path)), driver


@pytest.fixture
def made(loaded: tuple[Any, Driver]) -> Iterator[tuple[Any, Driver]]:
    module, driver = loaded
    driver.begin()
    stream = module.CopyStream(MAIN, OWN)  # takes event 1
    yield stream, driver
    driver.begin()


def test_commands_run_in_order_after_the_current_stream_and_own_copies_beside_them(made):
    stream, driver = made
    commands = PackedCommands.of([
        Post(100, -1, release=True), Until(108, 2, 1, "released", release=True), Copy(200, 300, 64, own=True),
        Copy(400, 300, 64), Copy(500, 300, 32, own=True), Post(116, 3), Until(124, 3, 1, "sent"),
    ])  # fmt: skip
    done = stream.run(CURRENT, commands.packed, 40, 7)
    assert driver.asked == [
        "event 1 on 13", "11 after event 1",
        "set 100: 6 on 11", "wait for 108: 9 on 11", "these 2",
        "event 1 on 11", "12 after event 1", "copy 300 to 200: 64 on 12", "copy 300 to 400: 64 on 11",
        "copy 300 to 500: 32 on 12", "set 116: 43 on 11", "wait for 124: 43 on 11", "these 2",
        "event 1 on 12", "11 after event 1", "event 2 on 11",
    ]  # fmt: skip
    assert not done.query()
    done.wait(CURRENT)
    assert driver.asked[-1] == "13 after event 2"
    del done
    assert driver.asked[-1] == "no event 2"
    assert [flag.value for flag in commands.flags] == [2, 3]


def test_flags_wrap_around_and_many_are_set_in_batches(made):
    stream, driver = made
    commands = PackedCommands.of([Post(8 * at, 2) for at in range(300)])
    stream.run(CURRENT, commands.packed, 2**32 - 1, 0)
    assert driver.asked[2] == "set 0: 1 on 11"
    assert [line for line in driver.asked if line.startswith("these")] == ["these 256", "these 44"]


def test_a_thread_on_another_device_enters_the_streams_context(made):
    stream, driver = made
    driver.begin(context=2)
    done = stream.run(CURRENT, b"", 0, 0)
    assert driver.asked[0] == "context 1"
    assert driver.asked[-1] == "context before"
    done.wait(CURRENT)
    assert driver.asked[-3:] == ["context 1", "13 after event 1", "context before"]
    del done


def test_streams_can_be_made_in_a_thread_that_has_not_used_the_gpu(loaded):
    module, driver = loaded
    driver.begin(context=0)
    stream = module.CopyStream(MAIN, OWN)
    assert driver.asked == ["context 1", "context before"]
    driver.begin()
    stream.run(CURRENT, b"", 0, 0)
    assert not any(line.startswith("context") for line in driver.asked)


@pytest.mark.parametrize(
    "call", ["cuMemcpyAsync", "cuStreamBatchMemOp", "cuStreamWaitEvent", "cuEventRecord", "cuCtxPushCurrent"]
)
def test_an_error_of_the_driver_names_the_call(made, call: str):
    stream, driver = made
    driver.begin(call, context=2)
    with pytest.raises(RuntimeError, match=f"{call} failed with CUDA driver error 700"):
        stream.run(CURRENT, PackedCommands.of([Post(8, 1), Copy(1, 2, 3)]).packed, 0, 0)


def test_a_library_without_the_functions_is_refused(loaded, tmp_path: Path):
    with pytest.raises(OSError, match="has no cuMemcpyAsync"):
        loaded[0].open_driver("libm.so.6")
    with pytest.raises(OSError, match="no_such"):
        command_queues._native(tmp_path, "/no_such/" + DRIVER)

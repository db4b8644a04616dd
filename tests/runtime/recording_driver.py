"""A fake libcuda that records launches."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from overlapc.runtime.toolchain import find_compiler

DRIVER = """
#include <stdint.h>
#include <string.h>
struct Launch { void *function, *stream; unsigned grid, block, shared; uint64_t parameters[8]; };
struct Launch launches[16];
int count, fails, reads;  /* reads: parameters of each launch */
void *context = (void *)1;
extern "C" int cuCtxGetCurrent(void **out) { *out = context; return 0; }
extern "C" int cuGetErrorString(int error, const char **text) { *text = "made to fail"; return 0; }
extern "C" int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                              unsigned shared, void *stream, void **parameters, void **extra) {
  if (fails || y != 1 || z != 1 || by != 1 || bz != 1 || extra) return 700;
  struct Launch *launch = &launches[count++];
  *launch = (struct Launch){function, stream, x, bx, shared, {}};
  for (int at = 0; at < reads; ++at) launch->parameters[at] = *(uint64_t *)parameters[at];
  return 0;
}
extern "C" void reset(int parameters) { count = fails = 0; reads = parameters; context = (void *)1; }
extern "C" void fail() { fails = 1; }
extern "C" void move_away() { context = (void *)2; }
extern "C" int seen(uint64_t *out) {
  for (int at = 0; at < count; ++at) {
    struct Launch *launch = &launches[at];
    uint64_t row[13] = {(uint64_t)launch->function, (uint64_t)launch->stream, launch->grid, launch->block,
                        launch->shared};
    memcpy(row + 5, launch->parameters, sizeof launch->parameters);
    memcpy(out + 13 * at, row, sizeof row);
  }
  return count;
}
"""


class Driver:
    """A fake libcuda, compiled into `folder`; `launches` returns what was launched."""

    def __init__(self, folder: Path) -> None:
        source, self.path = folder / "driver.cpp", folder / "libdriver.so"
        source.write_text(DRIVER)
        command = [*find_compiler().command, "-shared", "-fPIC", "-o", str(self.path), str(source)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(self.path))

    def launches(self) -> list[list[int]]:
        rows = (ctypes.c_uint64 * (13 * 16))()
        return [list(rows[13 * at : 13 * at + 13]) for at in range(self.library.seen(rows))]

"""Run PyTorch's own tests with overlapc in the place of Inductor and of Dynamo's eager backends; list new failures.

    git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch   # the version that is installed
    python benchmarks/pytorch_tests.py pytorch/test/inductor/test_torchinductor.py -k _cpu -n 8
    python benchmarks/pytorch_tests.py pytorch/test/inductor/test_torchinductor_dynamic_shapes.py -n 8
    python benchmarks/pytorch_tests.py pytorch/test/dynamo/test_misc.py -n 8

Options that this script does not know go to pytest. The tests run twice, as they are and with overlapc, each time in
new processes. A test that passes only as it is counts as a new failure, which is not always one of overlapc: many
tests assert how many kernels Inductor generates, or what its code says, and overlapc rounds float16 and bfloat16 as
often as eager does, where Inductor rounds once. Random numbers are drawn by calls, as in eager (`fallback_random`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

_VERDICTS = ("passed", "skipped", "failed")
_REPLACE = "PYTORCH_TESTS_REPLACE_BACKENDS"  # set for the run with overlapc, whose processes load this as a plug-in


class Outcome(NamedTuple):
    """How a test ended, with the first line of its error."""

    verdict: str
    error: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a test file within the folder `test` of a clone of PyTorch")
    parser.add_argument("--seconds", type=float, default=3600, help="limit for each run (default: %(default)s)")
    args, for_pytest = parser.parse_known_args()
    if not args.file.is_file():
        raise SystemExit(f"{args.file} does not exist\nhint: clone PyTorch in the version that is installed")
    as_it_is, ours = (run(args.file, replace, for_pytest, args.seconds) for replace in (False, True))
    print(tabulate([counted("as they are", as_it_is), counted("with overlapc", ours)], ["tests", *_VERDICTS]))
    failed = [name for name, each in ours.items() if each.verdict == "failed"]
    new = [[name, ours[name].error] for name in failed if as_it_is.get(name) == Outcome("passed")]
    print(f"\n{len(new)} new failures" + (":\n" + tabulate(new, tablefmt="plain") if new else ""))


def counted(how: str, found: Mapping[str, Outcome]) -> list[Any]:
    """Return a row of the table: how the tests ran, and how many ended in each way."""
    counts = Counter(each.verdict for each in found.values())
    return [how, *(counts[verdict] for verdict in _VERDICTS)]


def run(file: Path, replace: bool, options: Sequence[str], seconds: float) -> dict[str, Outcome]:
    """Return how each test of the file ended."""
    here = Path(__file__).resolve().parent
    path = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop(_REPLACE, None)
    if replace:
        environment |= {_REPLACE: "1", "OVERLAPC_FALLBACK_RANDOM": "1"}  # so that random numbers are eager's
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")  # not the configuration of PyTorch or of this project
        found = Path(folder) / "found.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "pytorch_tests", "-p", "no:cacheprovider"]
        command += ["-c", f"{folder}/pytest.ini", "--rootdir", folder, f"--junitxml={found}", "--tb=line"]
        command += [str(file.resolve()), *options]
        try:
            ran = subprocess.run(command, env=environment, timeout=seconds, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the tests did not end within {seconds:g} s\nhint: --seconds, -n or -k") from None
        if not found.exists():
            raise SystemExit(f"pytest ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        return outcomes(ElementTree.parse(found).getroot(), ran.stdout)


def outcomes(report: ElementTree.Element, output: str) -> dict[str, Outcome]:
    """Return the outcomes of a report in JUnit's form; raise SystemExit, with pytest's output, if nothing ran."""
    found = {}
    for case in report.iter("testcase"):
        parts = {part.tag: part for part in case}
        bad = parts.get("failure", parts.get("error"))
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}.{case.get('name')}"
        if bad is not None:
            lines = (bad.get("message") or bad.text or "").strip().splitlines()
            found[name] = Outcome("failed", lines[0][:120] if lines else "")
        else:
            found[name] = Outcome("skipped" if "skipped" in parts else "passed")
    if not found:
        raise SystemExit(f"no test ran:\n{output[-2000:]}")
    return found


def pytest_configure(config: Any) -> None:
    """Replace the backends before the tests are imported, if this process belongs to the run with overlapc."""
    if os.environ.get(_REPLACE):
        replace_backends()


def replace_backends() -> None:
    """Let overlapc compile whatever Inductor, `eager` and `aot_eager` would, also for Dynamo's counters of graphs."""
    import torch._dynamo.testing
    import torch._inductor.compile_fx
    from torch._dynamo.backends import registry

    from overlapc.backend import overlapc

    def compile_fx(gm: Any, inputs: Any, **options: Any) -> Any:
        return overlapc(gm, inputs)

    torch._inductor.compile_fx.compile_fx = compile_fx  # the default of torch.compile looks it up at each call
    for name in ("inductor", "eager", "aot_eager"):
        registry.lookup_backend(name)  # registers all of torch's
        registry._COMPILER_FNS[name] = compile_fx

    def count(self: Any, gm: Any, inputs: Any) -> Any:
        self.frame_count += 1
        self.op_count += sum("call" in node.op for node in gm.graph.nodes)
        return overlapc(gm, inputs)

    torch._dynamo.testing.CompileCounter.__call__ = count


if __name__ == "__main__":
    main()

"""Run all of torch's operators with the backend: `python -m tests.ops.sweep --shard 0/4 --out sweep.jsonl`.

Writes one JSON line per sample: operator, sample number, dtype, dynamic or not, outcome, reason. `--summary` counts
the outcomes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from tests.codegen.interpreted import triton_on_cpu
from tests.ops.harness import classify, full_name, in_form, operators, samples


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th operator from the I-th on (default: 0/1)")
    parser.add_argument("--ops", default="", help="only operators of these names, comma separated")
    parser.add_argument("--dtype", default="float32", help="dtype of the samples (default: float32)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--interpret", action="store_true", help="Triton's kernels, interpreted on the CPU")
    parser.add_argument("--shapes", choices=("static", "dynamic", "both"), default="both")
    parser.add_argument("--samples", type=int, default=3, help="samples of each operator, 0 for all (default: 3)")
    parser.add_argument(
        "--form", choices=("plain", "holes", "transposed", "special"), default="plain", help="of the samples' tensors"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the samples (default: 0)")
    parser.add_argument("--cache", default="", help="folder of compiled kernels (default: overlapc's own)")
    parser.add_argument("--out", default="", help="JSON lines file to append to (default: standard output)")
    parser.add_argument("--summary", nargs="+", metavar="FILE", help="count the outcomes in these files and stop")
    given = parser.parse_args(arguments)
    if given.summary:
        print(summary([json.loads(line) for file in given.summary for line in Path(file).read_text().splitlines()]))
        return 0
    with triton_on_cpu() if given.interpret else nullcontext():
        sweep(given)
    return 0


def sweep(given: argparse.Namespace) -> None:
    """Run the operators and samples that the arguments select, and write a line for each sample."""
    options: dict[str, Any] = {"cache_dir": given.cache} if given.cache else {}
    out = open(given.out, "a") if given.out else sys.stdout  # noqa: SIM115
    shard, shards = (int(part) for part in given.shard.split("/"))
    wanted = set(filter(None, given.ops.split(",")))
    dtype = getattr(torch, given.dtype)
    where = "interpreted" if given.interpret else given.device
    for op in operators()[shard::shards]:
        name = full_name(op)
        if (wanted and name not in wanted and op.name not in wanted) or dtype not in op.supported_dtypes(given.device):
            continue
        for number, plain in enumerate(samples(op, dtype, given.samples or None, given.seed, given.device)):
            sample = in_form(plain, given.form)
            for dynamic in {"static": (False,), "dynamic": (True,), "both": (False, True)}[given.shapes]:
                began = time.perf_counter()
                counters.pop("overlapc", None)
                outcome = classify(op, sample, dynamic, options)
                fallbacks = [key.split()[1] for key in counters["overlapc"] if key.startswith("fallback ")]
                line = {
                    "op": name, "sample": number, "device": where, "dtype": given.dtype, "dynamic": dynamic,
                    "seed": given.seed, "form": given.form, "outcome": outcome.kind, "reason": outcome.reason,
                    "fallbacks": fallbacks, "seconds": round(time.perf_counter() - began, 2),
                }  # fmt: skip
                print(json.dumps(line), file=out, flush=True)


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """Return counts by outcome, each failure with the operators that it affects, and the ops called as fallbacks."""
    counts = Counter(line["outcome"] for line in lines)
    text = [f"{len(lines)} samples of {len({line['op'] for line in lines})} operators: {dict(counts)}"]
    causes: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["outcome"] in ("raises", "differs"):
            causes[line["outcome"], line["reason"][:160]].append(line)
    for (kind, reason), found in sorted(causes.items(), key=lambda item: -len(item[1])):
        names = ", ".join(sorted({line["op"] + (" (dynamic)" if line["dynamic"] else "") for line in found}))
        text.append(f"{len(found)} × {kind}: {reason}\n    {names}")
    called = Counter(name for line in lines for name in line.get("fallbacks", ()))
    ran = {line["op"] for line in lines if line["outcome"] == "pass"}
    with_calls = {line["op"] for line in lines if line["outcome"] == "pass" and line.get("fallbacks")}
    text.append(f"operators without a call: {len(ran - with_calls)}; with calls for some part: {len(with_calls)}")
    text.append("called as they stand: " + ", ".join(f"{name} {times}" for name, times in called.most_common()))
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())

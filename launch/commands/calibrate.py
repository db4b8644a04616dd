"""`overlapc calibrate`."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from overlapc.documents import write_file
from overlapc.launch.commands.common import check_torch, output_file
from overlapc.launch.torchrun import run_ranks


def calibrate(
    nproc: Annotated[
        int, typer.Option(metavar="N", help="processes on this host, one per GPU; 1 measures no links")
    ] = 2,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="device to measure (default: cuda if available)")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="the profile to write (default: <name>.json)", show_default=False),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="name of the profile (default: the device's name)")
    ] = "",
    ranks_per_host: Annotated[
        int,
        typer.Option(
            metavar="N", help="GPUs (ranks) per host (default: as many as this machine has)", show_default=False
        ),
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="measure only the few sizes of the default CPU profile: about ten seconds")
    ] = False,
    copies_for: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="measure only collectives by peer-to-peer copies (transport=copy), and add their times to this"
            " profile",
            show_default=False,
        ),
    ] = "",
    records: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="RECORD|DIR",
            help="measure nothing, but fit --profile to measured runs: a record, or the folder of"
            " `overlapc demo --profile` with the records of all ranks; may be repeated",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="with --from: the profile to start from, a name or a file")
    ] = "h200-nvlink",
) -> None:
    """Measure this machine and write a device profile: matmuls, memory, kernels, collectives, contention.

    Takes one to two minutes. Use the profile with -o profile=FILE, or OVERLAPC_PROFILE=FILE. With --from, a profile is
    corrected by the prediction errors of measured training steps instead.
    """
    if records:
        target = _profile_file(out, name or f"{Path(profile).stem}-fed-back")
        _feed_back(profile, records, target, name)
        return
    check_torch()
    from overlapc.launch.calibrate import CalibrateConfig

    if not device:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg = CalibrateConfig(nproc, device, name, ranks_per_host, quick, copies_for)
    cfg.check()
    target = _profile_file(out, cfg.profile_name)
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "overlapc.launch.calibrate", json.dumps(dataclasses.asdict(cfg)), str(target))
        run_ranks(command, nproc, Path(folder))


def _profile_file(out: Path | None, name: str) -> Path:
    return output_file((out or Path(f"{name}.json")).resolve(), "a profile", (".json",))


def _feed_back(profile: str, records: Sequence[Path], target: Path, name: str) -> None:
    from overlapc.report.measured_runs import feedback_text, refine

    feedback, document = refine(profile, records)
    if name:
        document["name"] = name
    write_file(target, json.dumps(document, indent=1) + "\n")
    print(f"{feedback_text(feedback)}\n\nwritten to {target}")

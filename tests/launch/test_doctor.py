"""What `overlapc doctor` reports about a machine, and its hints where something is wrong."""

from __future__ import annotations

import torch

from overlapc.config import Config
from overlapc.estimators.device import DeviceProfile
from overlapc.launch import doctor
from overlapc.launch.cli import main


def test_the_command_reports_every_part_of_the_machine(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for what in ("torch", "C++ compiler", "devices" if not torch.cuda.is_available() else "GPU 0", "cache", "profile"):
        assert sum(line.startswith(f"{what} ") for line in shown.splitlines()) == 1, what
    assert "cpu-gloo, named by an option" in shown or torch.cuda.is_available()
    assert "TFLOP/s" in shown
    assert "from the profile's" in shown


def test_a_machine_that_is_far_from_its_profile_should_be_calibrated():
    near, far = (doctor.compared("copies", rate, 100e9, 1e9, "GB/s") for rate in (90e9, 50e9))
    assert (near.found, near.hint) == ("90 GB/s, -10% from the profile's 100", "")
    assert far.found == "50 GB/s, -50% from the profile's 100"
    assert "overlapc calibrate" in far.hint
    (product, copy) = doctor.measured(torch.device("cpu"), DeviceProfile("empty"))
    assert "not in the profile" in product.found
    assert "not in the profile" in copy.found


def test_a_cache_folder_that_would_be_refused_is_reported_with_the_reason(tmp_path):
    config = Config.of({"cache_dir": str(tmp_path / "kernels")})
    assert doctor.cache(config).found.endswith("not created yet")
    (tmp_path / "kernels").mkdir(mode=0o700)
    (tmp_path / "kernels" / "a").write_bytes(b"x" * 2048)
    assert "2KiB" in doctor.cache(config).found
    (tmp_path / "kernels").chmod(0o777)
    assert "everyone may write to it" in doctor.cache(config).hint


def test_a_cache_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").touch()
    finding = doctor.cache(Config(cache_dir=tmp_path / "file" / "below" / "kernels"))
    assert finding.found.endswith(f"cannot be created in {tmp_path / 'file'}")
    assert "set OVERLAPC_CACHE_DIR" in finding.hint


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    finding = doctor.compiler(torch.device("cpu"))
    assert finding.found == "none"
    assert finding.hint.endswith("install g++")

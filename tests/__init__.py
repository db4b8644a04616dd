"""Tests, in folders that mirror the source; what many of them use lies beside this file."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the repository

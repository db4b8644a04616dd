"""Tests, in folders that mirror the source; helpers shared by several folders lie beside this file."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the repository's root

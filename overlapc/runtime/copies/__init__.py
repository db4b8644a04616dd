"""Collectives by copies between the memories of one host's ranks (`transport=copy`); see docs/ARCHITECTURE.md."""

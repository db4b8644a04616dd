"""Collectives by copies between the memories of ranks of one host (`transport=copy`); docs/ARCHITECTURE.md says how."""

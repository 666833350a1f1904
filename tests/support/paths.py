"""Paths of the checkout, for tests that run programs or read documents."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

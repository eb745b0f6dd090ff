"""Streams under every crash that the simulated disk knows."""

from __future__ import annotations

from hypothesis import settings

from tests.storage.lab.machine import Laboratory

TestLaboratory = Laboratory.TestCase
TestLaboratory.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)

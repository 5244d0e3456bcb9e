"""Versions."""

cuda = "0"

"""Penstock keeps GPUs fed."""

"""Measurements of mha_ext beside what a PyTorch user has today: ``python -m benchmarks.run --help``."""

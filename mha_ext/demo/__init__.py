"""The demonstration: one small language model, trained with PyTorch's layer and with ours.

Run it with ``python -m mha_ext.demo`` (``--quick`` for a run of a few seconds).
"""

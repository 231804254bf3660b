"""Parts of ``benchmarks/kernels.py``: one layer-step of a recurrent layer, timed on a GPU."""

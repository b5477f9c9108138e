"""The names by which a model.py written for DJL Serving's LMI containers knows its requests."""

from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.pair_list import PairList

__all__ = ["Input", "Output", "PairList"]

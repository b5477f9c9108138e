"""The API that a model.py written for DJL Serving's LMI containers imports."""

from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.pair_list import PairList

__all__ = ["Input", "Output", "PairList"]

"""The API that a model.py written for DJL Serving's LMI containers imports."""

from engine.tasks.handlers.djl_python.inputs import Input
from engine.tasks.handlers.djl_python.outputs import Output
from engine.tasks.handlers.djl_python.pair_list import PairList

__all__ = ["Input", "Output", "PairList"]

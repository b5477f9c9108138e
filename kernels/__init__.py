"""Functions of tensors over paged KV memory.

NOTE: transformers probes for a distribution named `kernels` and imports whatever package has
that name, so this file must stay a docstring: no import, no `__version__`.
"""

"""Repairs Triton's CPU interpreter (TRITON_INTERPRET=1) where it differs from GPUs.

Errors in the interpreter of triton 3.6 to 3.9, and the repairs:

- bf16 and fp8 live in numpy arrays of uint16 and uint8, and dot, arithmetic, comparisons and
  reductions run on those bits as if they were numbers: here they run on the values, in fp32.
- A cast to bf16 truncates. A cast to fp8 loses the carry of the rounding and does not saturate.
  Here both round to nearest even, and fp8 saturates, as the hardware's cvt.rn.satfinite does.
- triton 3.6 turns arrays of one element into ints in a way that numpy >= 2.4 refuses, so that no
  loop with a run-time bound works: here `__index__` takes the element.
- A constant of type bf16 has no constructor: here it has one.
- exp is numpy's, which rounds differently from torch's: here it is torch's.

Inline assembly and libdevice functions are not repaired, so do not use them in kernels.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder as Builder
from triton.runtime.interpreter import TensorHandle

FP8 = {
    tl.float8e4nv: (torch.float8_e4m3fn, 1.0),
    tl.float8e5: (torch.float8_e5m2, 1.0),
    tl.float8e4b15: (torch.float8_e4m3fn, 2.0**-8),
}
"""Torch's type of the same bits, and the factor from its values to those of Triton's type.

float8e4b15 has e4m3's bits, with an exponent bias of 15 instead of 7. It has no NaN: the two codes
that are NaN in e4m3 are ±1.875.
"""

STORED_AS_BITS = frozenset(dtype.name for dtype in (tl.bfloat16, *FP8))


def repair() -> None:
    """Patch the interpreter of this process permanently. Call it once, before any kernel runs."""
    _repair_casts()
    _repair_arithmetic()
    _repair_reductions()
    _repair_index()
    _repair_exp()
    _repair_calls()
    _quicken_types()
    _quicken_shapes()
    _quicken_overflow_checks()


def is_stored_as_bits(dtype: tl.dtype) -> bool:
    return dtype.scalar.name in STORED_AS_BITS


def values_of(handle: TensorHandle) -> np.ndarray:
    """Return the handle's values: narrow floats as fp32, others unchanged."""
    dtype, data = handle.dtype.scalar, handle.data
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype in FP8:
        bits = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).copy())
        torch_type, factor = FP8[dtype]
        values = bits.view(torch_type).float() * factor
        if dtype == tl.float8e4b15:
            values = torch.where(values.isnan(), 1.875, values).copysign(bits.view(torch.int8))
        return values.numpy().reshape(data.shape)
    return data.astype(np.float32) if data.dtype == np.float16 else data


def handle_of(values: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """Encode values in `dtype`: rounded to nearest even, fp8 saturated."""
    dtype = dtype.scalar
    if not is_stored_as_bits(dtype):
        return TensorHandle(np.asarray(values).astype(interpreter._get_np_dtype(dtype)), dtype)
    exact = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
    if dtype == tl.bfloat16:
        return TensorHandle(exact.bfloat16().view(torch.int16).numpy().view(np.uint16), dtype)
    torch_type, factor = FP8[dtype]
    largest = torch.finfo(torch_type).max
    rounded = (exact / factor).clamp(-largest, largest).to(torch_type)
    return TensorHandle(rounded.view(torch.uint8).numpy(), dtype)


def _repair_casts() -> None:
    cast, float_cast = Builder.cast_impl, Builder.create_fp_to_fp

    def cast_impl(self, src, dst_type):
        if is_stored_as_bits(src.dtype) or is_stored_as_bits(dst_type):
            return handle_of(values_of(src), dst_type)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if not (is_stored_as_bits(src.dtype) or is_stored_as_bits(dst_type)):
            return float_cast(self, src, dst_type, rounding_mode)
        if rounding_mode == ir.ROUNDING_MODE.RTZ:
            raise ValueError("rounding towards zero is not repaired in tests/kernels")
        return handle_of(values_of(src), dst_type)

    Builder.cast_impl, Builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    Builder.get_bf16 = lambda self, value: handle_of(np.array([value]), tl.bfloat16)


def _repair_arithmetic() -> None:
    """Make operators work on values. A result, unless bool, has the type of the last operand."""

    def on_values(method):
        def call(self, *operands):
            handles = [operand for operand in operands if isinstance(operand, TensorHandle)]
            if not any(is_stored_as_bits(handle.dtype) for handle in handles):
                return method(self, *operands)
            widened = [
                TensorHandle(values_of(operand), tl.float32)
                if isinstance(operand, TensorHandle) and is_stored_as_bits(operand.dtype)
                else operand
                for operand in operands
            ]
            result = method(self, *widened).data
            return handle_of(result, tl.int1 if result.dtype == np.bool_ else handles[-1].dtype)

        return call

    for name in ("binary_op", "unary_op", "create_fma", "create_clampf", "create_rsqrt"):
        setattr(Builder, name, on_values(getattr(Builder, name)))

    def create_dot(self, a, b, accumulator, input_precision, max_num_imprecise_acc):
        """Compute exact products, summed in the accumulator's type, as tensor cores do."""
        rows = values_of(a)[..., None, :]  # one by one: a library's sums may depend on their number
        product = np.matmul(rows, values_of(b)[..., None, :, :], dtype=accumulator.data.dtype)
        product = product[..., 0, :]
        return TensorHandle(product + accumulator.data, accumulator.dtype.scalar)

    Builder.create_dot = create_dot


def _repair_reductions() -> None:
    """Patch tl.sum, tl.max and the like, which do not go through the builder."""
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply_impl = _on_widened_tensors(operation.apply_impl)


def _on_widened_tensors(apply_impl):
    def widen(tensor):
        if not is_stored_as_bits(tensor.dtype):
            return tensor
        kind = tl.block_type(tl.float32, list(tensor.shape)) if tensor.shape else tl.float32
        return tl.tensor(TensorHandle(values_of(tensor.handle), tl.float32), kind)

    def narrow(tensor, dtype):
        if not is_stored_as_bits(dtype) or tensor.dtype != tl.float32:
            return tensor
        kind = tl.block_type(dtype, list(tensor.shape)) if tensor.shape else dtype
        return tl.tensor(handle_of(tensor.handle.data, dtype), kind)

    def apply(self, inputs):
        result = apply_impl(self, tuple(widen(tensor) for tensor in inputs))
        if not isinstance(result, tuple | list):
            return narrow(result, inputs[0].dtype)
        return [narrow(*pair) for pair in zip(result, [i.dtype for i in inputs], strict=False)]

    return apply


def _repair_index() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patch


def _repair_exp() -> None:
    """Use torch's exp: on a GPU, kernels that need its bits call the same function as torch."""

    def exp(values: np.ndarray) -> np.ndarray:
        if values.dtype != np.float32:
            return np.exp(values)
        return torch.from_numpy(np.ascontiguousarray(values)).exp().numpy().reshape(values.shape)

    Builder.create_exp = lambda self, arg: self.unary_op(arg, exp)


def _repair_calls() -> None:
    """Patch triton.language once per module, not in every call of a kernel's function.

    Patching it in every call took half the time of kernels with many short functions.
    """
    modules: set[str] = set()

    def call(self, *args, **kwargs):
        if self.fn.__module__ not in modules:
            interpreter._patch_lang(self.fn)
            modules.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _quicken_types() -> None:
    """Look up each type's numpy dtype once: the interpreter makes the whole table in every call."""
    of_scalar = cache(interpreter._get_np_dtype)

    def numpy_type(kind):
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else of_scalar(kind.scalar)

    interpreter._get_np_dtype = numpy_type


def _quicken_shapes() -> None:
    """Make the tuples of each shape once: the interpreter makes them anew for every tensor."""
    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__

    @cache
    def of_block(*sizes):
        block = SimpleNamespace()
        make_block(block, tl.int1, list(sizes))
        return block.shape, block.numel

    @cache
    def of_tensor(*sizes):
        type = tl.block_type(tl.int1, sizes) if sizes else tl.int1
        tensor = tl.tensor.__new__(tl.tensor)
        make_tensor(tensor, None, type)
        return tensor.shape, tensor.numel

    def init_block(self, element_ty, shape):
        self.element_ty = element_ty
        self.shape, self.numel = of_block(*[getattr(size, "value", size) for size in shape])

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(*type.shape if type.is_block() else ())

    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")


def _quicken_overflow_checks() -> None:
    """Check sums, differences and products of integers in numpy.

    Triton's own check runs eight of its operators for each of them, a third of all time.
    """
    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self, lhs, rhs, binary_op):
        kind, name = lhs.type.scalar, binary_op.__name__
        if kind.int_bitwidth < 64:
            result = exact[name](lhs.handle.data, rhs.handle.data, dtype=np.int64)
            low, high = kind.get_int_min_value(), kind.get_int_max_value()
            assert ((low <= result) & (result <= high)).all(), f"{kind} overflows in {name}"

    TritonSemantic.binary_op_sanitize_overflow_impl = check

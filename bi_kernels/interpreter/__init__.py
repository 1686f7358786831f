"""Makes Triton's CPU interpreter right for bf16 and bit-exact for sm_90.

- bf16 stays uint16 in memory; every cast, comparison and arithmetic operation on it goes through fp32.
- `tl.dot` on bf16 and fp16 gives the bits that an H200 gave, through mma.sync and wgmma alike; on fp32 it is the chain
  of FMAs that Triton compiles for input_precision="ieee".
- A NaN that arithmetic or tl.sum makes is the GPU's: 0x7fffffff in fp32, 0x7fff in fp16 and bf16.
- What a kernel reads or writes beyond the tensors that it was given raises, also where no result holds it: a GPU may
  let it pass, or end the process. Not seen: what lies in another of them, or in the rest of a view's storage, and a
  launch whose kernel makes a pointer of a number.
- Programs of a launch run side by side where they go the same way (lockstep.py): one reads what another writes in the
  same launch, or does not, as on a GPU.
- What is not right raises. Not made equal, because the GPU's own result depends on the layout or is an approximation:
  fp32 sums and scans, the sign of a zero from `tl.max`, `/` (but `tl.div_rn` is), exp, log, rsqrt and their like.
  Nor is what the compiler rewrites: it fuses a * b + c unless told not to, and acc + tl.dot(a, b) into
  tl.dot(a, b, acc), so write the latter; a NaN that it clamps between a constant and its negative may become either.
"""

import inspect
from dataclasses import replace

import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle

from bi_kernels.contract import CONTRACT
from bi_kernels.interpreter.builder import Builder, Reduce, Scan
from bi_kernels.interpreter.formats import numpy_dtype
from bi_kernels.interpreter.launch import Launch, builtin
from bi_kernels.interpreter.tensors import (
    Loops,
    Semantic,
    argument,
    init_block_type,
    init_handle,
    init_tensor,
    same_dtype,
    unwrap,
)


def interpreting() -> bool:
    """Tells whether kernels run in the interpreter: TRITON_INTERPRET=1 before the first `import triton`."""
    return triton.knobs.runtime.interpret


def install() -> None:
    """Patches the interpreter of this process, once. RuntimeError on a Triton version it was not checked with."""
    if isinstance(stock.interpreter_builder, Builder):
        return
    checked = CONTRACT["triton"]["interpreter"]
    if triton.__version__ not in checked:
        raise RuntimeError(
            f"bi_kernels patches Triton's interpreter and was checked with {', '.join(checked)}, "
            f"but this is Triton {triton.__version__}"
        )
    stock.interpreter_builder.__class__, stock.interpreter_semantic.__class__ = Builder, Semantic
    # as compiled kernels have it; the check of every integer addition costs a quarter of the time
    stock.interpreter_builder.options = replace(stock.interpreter_builder.options, sanitize_overflow=False)
    stock.FunctionRewriter.ast_transformer = Loops()
    stock.ReduceOps, stock.ScanOps, stock.GridExecutor = Reduce, Scan, Launch
    stock._patch_lang = lambda fn: stock._LangPatchScope()
    stock._implicit_cvt, stock._get_np_dtype, TensorHandle.__init__ = argument, numpy_dtype, init_handle
    tl.tensor.__init__, tl.block_type.__init__ = init_tensor, init_block_type
    tl.core._unwrap_if_constexpr, tl.dtype.__eq__ = unwrap, same_dtype
    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(owner, tl.core.is_builtin):
            setattr(owner, name, builtin(member))

"""Holds what sm_90's prefill does with the scores and the state of rows: the softmax of a block, and products by a
factor of each row that are left out where they change no bit."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bi_kernels.ops.attention.hopper.common import capped, over


@gluon.jit
def softmax(s, m, l, start, bound, scale, steep, MASKED: gl.constexpr):
    """Returns (maximum, sum, factor of what was, p) after a block of scores, of which a row sees the keys below its
    bound."""
    s = capped(s, steep)
    if MASKED:
        key = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s = gl.where(key[None, :] < (bound - start)[:, None], s, -float("inf"))
    top = gl.maximum(m, gl.max(s, 1))
    base = gl.where(top == -float("inf"), 0.0, top)
    p = gl.exp2((s - base[:, None]) * scale)
    alpha = gl.exp2((m - base) * scale)
    return top, l * alpha + gl.sum(p, 1), alpha, p


@gluon.jit
def merge(m, l, acc, m_next, l_next, acc_next, scale):
    """Returns the state of some splits, and then of the next one."""
    top = gl.maximum(m, m_next)
    base = gl.where(top == -float("inf"), 0.0, top)
    a, b = gl.exp2((m - base) * scale), gl.exp2((m_next - base) * scale)
    return top, l * a + l_next * b, acc * over(a, acc) + acc_next * over(b, acc)


@gluon.jit
def with_sink(m, l, acc, scale, sink):
    """Returns what `forward_kernels._with_sink` does."""
    own, sink = m * scale, sink.to(gl.float32) * 1.4426950408889634
    top = gl.maximum(own, sink)
    base = gl.where(top == -float("inf"), 0.0, top)
    a, b = gl.exp2(own - base), gl.exp2(sink - base)
    return top, l * a + b, acc * over(a, acc)


@gluon.constexpr_function
def _multiply(count):
    """Returns PTX that multiplies a thread's `count` values of acc, two of its first row and two of its second in turn,
    by their factors, where these are not 1 for all rows of the warp."""
    text = "{ .reg .pred p, some;"
    for row, label in enumerate(("FIRST", "SECOND")):
        factor = f"${2 * count + 2 * row}"
        text += f" setp.neu.f32 p, {factor}, 0f3F800000; vote.sync.any.pred some, p, -1; @!some bra {label};"
        for k in range(count):
            text += f" mul.rn.f32 ${k}, ${k}, {factor};" if k % 4 // 2 == row else ""
        text += f" {label}:"
    return text + " }"


@gluon.constexpr_function
def _registers(count):
    return ",".join(["=f"] * count + [str(k) for k in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(acc, alpha):
    """Returns acc * alpha, of rows: the maximum seldom grows, and x * 1 is x."""
    COUNT: gl.constexpr = acc.shape[1] // 2
    factor, _ = gl.broadcast(over(alpha, acc), acc)
    return gl.inline_asm_elementwise(_multiply(COUNT), _registers(COUNT), [acc, factor], gl.float32, False, COUNT)


@gluon.constexpr_function
def _round(dtype):
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def paired(p, dtype: gl.constexpr):
    """Returns p, rounded, with two columns in a register."""
    ROWS: gl.constexpr = p.shape[0]
    HALF: gl.constexpr = p.shape[1] // 2
    low, high = p.reshape([ROWS, HALF, 2]).split()
    return gl.inline_asm_elementwise(_round(dtype), "=r,f,f", [low, high], gl.int32, True, 1)


@gluon.jit
def weights(p, dtype: gl.constexpr, D: gl.constexpr):
    """Returns p, or `paired` of it, as the operand of a product with V."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(
        0, gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16]), 2
    )
    if p.dtype == gl.int32:
        ROWS: gl.constexpr = p.shape[0]
        BLOCK: gl.constexpr = 2 * p.shape[1]
        both = gl.join(p.to(gl.int16), (p >> 16).to(gl.int16)).reshape([ROWS, BLOCK])
        rounded = both.to(dtype, bitcast=True)
    else:
        rounded = p.to(dtype)
    return gl.convert_layout(rounded, OPERAND)

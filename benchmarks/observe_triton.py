"""The kernel of Triton that `observe_programs` launches."""

import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": size}, num_warps=4) for size in (256, 512, 1024)]


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def gate(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n)
    b = tl.load(y + at, mask=at < n)
    tl.store(out + at, a * tl.sigmoid(a) * b, mask=at < n)

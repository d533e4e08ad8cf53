// The five products for 2 to 64 rows over bfloat16 inputs (matmul.cuh), which the previous attention or
// product writes; `norm_rows` writes them before the first layer.
//
// Physics.  With float32 inputs a step of many rows would wait for them: every block would bring 4 * ROWS *
// INPUTS bytes through its registers, and norm and round them, while no weights are loaded.  Inputs that are
// rounded once have half as many bytes, and are copied while earlier steps are multiplied.  The norm's scale
// needs a whole row, so the product that reads the inputs applies it.
#include "matmul.cuh"

// Gate and up with a rounded result, which is zero in padding rows.  Before the rounding, its quotients are off
// by up to two units in the last place.  (The product for one row divides exactly: with this division it would
// need 159 registers instead of 128.)
struct RoundedGateUpProduct : GateUpProduct {
    bf16* out;  // [ROWS, INNER], laid out by `rounded_at`

    DEVICE bf16& at(int index, int pair) const {
        return out[rounded_at(ROWS, INNER, index, pair / 8) * 8 + pair % 8];
    }
    DEVICE u64 finish(const Row&, int index, int pair, float a, float b, float2) const {
        at(index, pair) = to_bf16(divide_fast(a, 1.0f + exp2_fast(-1.44269504f * a)) * b);
        return 0;
    }
    DEVICE void fill(int index, int pair) const { at(index, pair) = 0; }
};

// A kernel is compiled if its shape is given; with SUM_SLOTS the one that adds the sums of all ranks.
#ifdef QKV_SHAPE
typedef QKV_SHAPE QkvShape;

#if QK_NORM
KERNEL __launch_bounds__(QkvShape::THREADS, QkvShape::RESIDENT)
    rounded_qkv(const int* live, const bf16* rounded, const Weight* weight, const u8* later, float* qkv, u64* squares,
                float* workspace, u32 row_count, u32 hidden, float epsilon) {
    __shared__ StepRows rows;
    const OfRounded<PlainQkvProduct, false, 1> product{{weight, nullptr, nullptr, epsilon, qkv}, rounded, squares};
    matmul(QkvShape(), product, live, workspace, rows, Later<QKV_PREFETCH>{later});
}
#else
KERNEL __launch_bounds__(QkvShape::THREADS, QkvShape::RESIDENT)
    rounded_qkv_rope(const int* live, const bf16* rounded, const Weight* weight, const u8* later, const float* bias,
                     const float* rope, bf16* cache, float* q, u64* squares, float* workspace,
                     u32 row_count, u32 hidden, u32 sequences, u32 context, float epsilon) {
    __shared__ StepRows rows;
    const OfRounded<QkvProduct, false, 1> product{{weight, nullptr, nullptr, epsilon, bias, rope, cache, q,
                                         static_cast<int>(sequences), static_cast<int>(context)},
                                        rounded,
                                        squares};
    product.ask_for_bias();
    matmul(QkvShape(), product, live, workspace, rows, Later<QKV_PREFETCH>{later});
}
#endif
#endif

#ifdef OUTPUT_SHAPE
typedef OUTPUT_SHAPE OutputShape;

#ifdef SUM_SLOTS
KERNEL __launch_bounds__(OutputShape::THREADS, larger(RESIDENT_BLOCKS, OutputShape::RESIDENT))
    rounded_output_of_ranks(const int* live, const bf16* rounded, const Weight* weight, const u8* later, float* x,
                            const float* norm, bf16* next, u64* squares, u64* sums, float* workspace, u32 row_count,
                            u32 hidden, u32 width, u32 rank) {
    __shared__ StepRows rows;
    const OfRounded<CarriedOfRanks<HEADS * HEAD_SIZE, 0>, true> product{
        {{{weight, nullptr, nullptr, 0.0f, x, x}, norm, next, squares}, SumsOfRanks(sums, rank)}, rounded};
    product.ask_for_norm();
    matmul(OutputShape(), product, live, workspace, rows, Later<OUTPUT_PREFETCH>{later});
}
#else
KERNEL __launch_bounds__(OutputShape::THREADS, OutputShape::RESIDENT)
    rounded_output(const int* live, const bf16* rounded, const Weight* weight, const u8* later, float* x, const float* norm,
                   bf16* next, u64* squares, float* workspace, u32 row_count, u32 hidden, u32 width) {
    __shared__ StepRows rows;
    const OfRounded<CarriedResidual<HEADS * HEAD_SIZE, 0>, true> product{
        {{weight, nullptr, nullptr, 0.0f, x, x}, norm, next, squares}, rounded};
    product.ask_for_norm();
    matmul(OutputShape(), product, live, workspace, rows, Later<OUTPUT_PREFETCH>{later});
}
#endif
#endif

#ifdef GATE_UP_SHAPE
typedef GATE_UP_SHAPE GateUpShape;

KERNEL __launch_bounds__(GateUpShape::THREADS, GateUpShape::RESIDENT)
    rounded_gate_up(const int* live, const bf16* rounded, const Weight* weight, const u8* later, bf16* out,
                    u64* squares, float* workspace, u32 row_count, u32 hidden, u32 width,
                    float epsilon) {
    __shared__ StepRows rows;
    const OfRounded<RoundedGateUpProduct, true> product{
        {{weight, nullptr, nullptr, epsilon, nullptr}, out}, rounded, squares};
    matmul(GateUpShape(), product, live, workspace, rows, Later<GATE_UP_PREFETCH>{later});
}
#endif

#ifdef DOWN_SHAPE
typedef DOWN_SHAPE DownShape;

#ifdef SUM_SLOTS
KERNEL __launch_bounds__(DownShape::THREADS, larger(RESIDENT_BLOCKS, DownShape::RESIDENT))
    rounded_down_of_ranks(const int* live, const bf16* rounded, const Weight* weight, const u8* later, float* x,
                          const float* norm, bf16* next, u64* squares, u64* sums, float* workspace, u32 row_count,
                          u32 hidden, u32 width, u32 rank) {
    __shared__ StepRows rows;
    const OfRounded<CarriedOfRanks<INNER, 1>, true> product{
        {{{weight, nullptr, nullptr, 0.0f, x, x}, norm, next, squares}, SumsOfRanks(sums, rank)}, rounded};
    product.ask_for_norm();
    matmul(DownShape(), product, live, workspace, rows, Later<DOWN_PREFETCH>{later});
}
#else
KERNEL __launch_bounds__(DownShape::THREADS, DownShape::RESIDENT)
    rounded_down(const int* live, const bf16* rounded, const Weight* weight, const u8* later, float* x, const float* norm,
                 bf16* next, u64* squares, float* workspace, u32 row_count, u32 hidden, u32 width) {
    __shared__ StepRows rows;
    const OfRounded<CarriedResidual<INNER, 1>, true> product{{{weight, nullptr, nullptr, 0.0f, x, x}, norm, next, squares},
                                                          rounded};
    product.ask_for_norm();
    matmul(DownShape(), product, live, workspace, rows, Later<DOWN_PREFETCH>{later});
}
#endif
#endif

#ifdef HEAD_SHAPE
typedef HEAD_SHAPE HeadShape;

// Leaves each block's largest key of each row in the workspace, [rows][blocks].
KERNEL __launch_bounds__(HeadShape::THREADS, HeadShape::RESIDENT)
    rounded_head(const int* live, const bf16* rounded, const Weight* weight, float* logits,
                 u64* squares, float* workspace, u32 row_count, u32 hidden, u32 vocabulary,
                 float epsilon) {
    __shared__ StepRows rows;
    __shared__ u64 bests[PADDED_ROWS];
    const OfRounded<HeadProduct, false, 1> product{{weight, nullptr, nullptr, epsilon, logits}, rounded, squares};
    for (int n = threadIdx.x; n < PADDED_ROWS; n += HeadShape::THREADS) bests[n] = 0;
    matmul(HeadShape(), product, live, workspace, rows, Later<0>(), bests);
    __syncthreads();
    for (int n = threadIdx.x; n < ROWS; n += HeadShape::THREADS)
        if ((rows.row[n].flags & HeadProduct::WANTED) == HeadProduct::WANTED)
            keys_of(workspace)[static_cast<long long>(n) * gridDim.x + blockIdx.x] = bests[n];
}
#endif

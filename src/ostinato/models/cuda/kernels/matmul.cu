// The five products for 2 to 64 rows over float32 inputs, which each block rounds (matmul.cuh).
#include "matmul.cuh"

// A kernel is compiled if its shape is given.
#ifdef QKV_SHAPE
typedef QKV_SHAPE QkvShape;

#if QK_NORM
KERNEL __launch_bounds__(QkvShape::THREADS, QkvShape::RESIDENT)
    norm_qkv(const int* live, const float* x, const float* norm, const Weight* weight, float* qkv,
             float* workspace, u32 row_count, u32 hidden, u32 heads, u32 kv_heads, u32 head_size,
             float epsilon) {
    __shared__ Wanted rows;
    const PlainQkvProduct product{weight, x, norm, epsilon, qkv};
    matmul(QkvShape(), product, live, workspace, rows);
}
#else
KERNEL __launch_bounds__(QkvShape::THREADS, QkvShape::RESIDENT)
    norm_qkv_rope(const int* live, const float* x, const float* norm, const Weight* weight,
                  const float* bias, const float* rope, bf16* cache, float* q, float* workspace,
                  u32 row_count, u32 hidden, u32 heads, u32 kv_heads, u32 head_size, u32 sequences,
                  u32 context, float epsilon) {
    __shared__ Wanted rows;
    const QkvProduct product{weight, x, norm, epsilon, bias, rope, cache, q,
                             static_cast<int>(sequences), static_cast<int>(context)};
    product.ask_for_bias();
    matmul(QkvShape(), product, live, workspace, rows);
}
#endif
#endif

#ifdef OUTPUT_SHAPE
typedef OUTPUT_SHAPE OutputShape;

KERNEL __launch_bounds__(OutputShape::THREADS, OutputShape::RESIDENT)
    output_residual(const int* live, const float* attended, const Weight* weight, float* x,
                    float* workspace, u32 row_count, u32 hidden, u32 width) {
    __shared__ Wanted rows;
    const ResidualProduct<HEADS * HEAD_SIZE> product{weight, attended, x, x};
    matmul(OutputShape(), product, live, workspace, rows);
}
#endif

#ifdef GATE_UP_SHAPE
typedef GATE_UP_SHAPE GateUpShape;

KERNEL __launch_bounds__(GateUpShape::THREADS, GateUpShape::RESIDENT)
    norm_gate_up(const int* live, const float* x, const float* norm, const Weight* weight,
                 float* inner, float* workspace, u32 row_count, u32 hidden, u32 width,
                 float epsilon) {
    __shared__ Wanted rows;
    const GateUpProduct product{weight, x, norm, epsilon, inner};
    matmul(GateUpShape(), product, live, workspace, rows);
}
#endif

#ifdef DOWN_SHAPE
typedef DOWN_SHAPE DownShape;

KERNEL __launch_bounds__(DownShape::THREADS, DownShape::RESIDENT)
    down_residual(const int* live, const float* inner, const Weight* weight, float* x,
                  float* workspace, u32 row_count, u32 hidden, u32 width) {
    __shared__ Wanted rows;
    const ResidualProduct<INNER> product{weight, inner, x, x};
    matmul(DownShape(), product, live, workspace, rows);
}
#endif

#ifdef HEAD_SHAPE
typedef HEAD_SHAPE HeadShape;

// Leaves each block's largest key of each row in the workspace, [rows][blocks].
KERNEL __launch_bounds__(HeadShape::THREADS, HeadShape::RESIDENT)
    head(const int* live, const float* x, const float* norm, const Weight* weight, float* logits,
         float* workspace, u32 row_count, u32 hidden, u32 vocabulary, float epsilon) {
    __shared__ Wanted rows;
    __shared__ u64 bests[PADDED_ROWS];
    const HeadProduct product{weight, x, norm, epsilon, logits};
    for (int n = threadIdx.x; n < PADDED_ROWS; n += HeadShape::THREADS) bests[n] = 0;
    matmul(HeadShape(), product, live, workspace, rows, bests);
    __syncthreads();
    for (int n = threadIdx.x; n < rows.count; n += HeadShape::THREADS)
        keys_of(workspace)[static_cast<long long>(rows.index[n]) * gridDim.x + blockIdx.x] = bests[n];
}
#endif

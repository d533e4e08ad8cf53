// What a warpgroup of compute capability 9.0 needs besides common.cuh: products whose operands are panels in
// shared memory or shares in registers, barriers of a part of a block, and copies of boxes of a tensor.
#pragma once

#include "common.cuh"

#ifndef EMULATED

// ------------------------------------------------------------------------------ products of a warpgroup

// Panels of 64 columns (128 bytes, WARPGROUP_PANELS in common.cuh) as an operand, the lower word of its
// descriptor.  `next`: bytes from a panel to the next, for an operand that is read turned.
typedef u32 Panels;
DEVICE Panels panels_at(const void* p, u32 next = 16) {
    return static_cast<u32>(__cvta_generic_to_shared(p)) >> 4 | next >> 4 << 16;
}
DEVICE Panels further(Panels panels, u32 bytes) { return panels + (bytes >> 4); }

DEVICE u64 panel_descriptor(const void* p) {  // rows of 128 bytes, in groups of 8, 128-byte swizzle
    const u64 at = __cvta_generic_to_shared(p);
    return (at & 0x3ffff) >> 4 | 1ull << 16 | 1024ull >> 4 << 32 | 1ull << 62;
}

#define HIGH_WORD "0x40000040"  // 1,024 bytes from 8 rows to the next 8, 128-byte swizzle
#define SUMS(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define SUMS_OF_4 SUMS(0), SUMS(1), SUMS(2), SUMS(3)
#define SUMS_OF_8 SUMS_OF_4, SUMS(4), SUMS(5), SUMS(6), SUMS(7)
#define SUMS_OF_16 SUMS_OF_8, SUMS(8), SUMS(9), SUMS(10), SUMS(11), SUMS(12), SUMS(13), SUMS(14), SUMS(15)
#define PLACES_OF_4 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES_OF_8 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_OF_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// c += a b^T over 16 columns, or c = a b^T if not ADD: a has 64 rows, 16 for each warp, b has COLUMNS, both
// bfloat16 in panels; c is laid out as by COLUMNS / 8 calls of `multiply_tile`.  Called between `start_group` and
// `end_group`; c is valid after `wait_products` and `settle`.
#define MULTIPLY_ROWS(COLUMNS, TILES, A, B, ADDS)                                                         \
    template <bool ADD> DEVICE void multiply_rows(float (&c)[TILES][4], Panels a, Panels b) {             \
        asm volatile("{\n\t.reg .pred p;\n\t.reg .b64 a, b;\n\tsetp.ne.b32 p, %" ADDS ", 0;\n\t"          \
                     "mov.b64 a, {%" A ", " HIGH_WORD "};\n\tmov.b64 b, {%" B ", " HIGH_WORD "};\n\t"     \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.bf16.bf16 {" PLACES_OF_##TILES \
                     "}, a, b, p, 1, 1, 0, 0;\n\t}"                                                       \
                     : SUMS_OF_##TILES                                                                    \
                     : "r"(a), "r"(b), "n"(static_cast<int>(ADD)));                                       \
    }
// The same from addresses, c += a b^T, for panels anywhere in a ring.
#define MULTIPLY_GROUP(COLUMNS, TILES, A, B)                                                              \
    DEVICE void multiply_group(float (&c)[TILES][4], const void* a, const void* b) {                      \
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, 1, 0;\n\t"                                    \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.bf16.bf16 {" PLACES_OF_##TILES \
                     "}, %" A ", %" B ", p, 1, 1, 0, 0;\n\t}"                                            \
                     : SUMS_OF_##TILES                                                                    \
                     : "l"(panel_descriptor(a)), "l"(panel_descriptor(b)));                               \
    }
// c += a b over 16 rows of b: a is in registers as for `multiply_tile`, 16 rows for each warp; b is read turned.
#define MULTIPLY_SHARES(COLUMNS, TILES, A, B)                                                             \
    DEVICE void multiply_shares(float (&c)[TILES][4], const u32 (&a)[4], Panels b) {                      \
        asm volatile("{\n\t.reg .b64 b;\n\tmov.b64 b, {%" B ", " HIGH_WORD "};\n\t"                        \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.bf16.bf16 {" PLACES_OF_##TILES \
                     "}, {" A "}, b, 1, 1, 1, 1;\n\t}"                                                    \
                     : SUMS_OF_##TILES                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                               \
    }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
MULTIPLY_ROWS("64", 8, "32", "33", "34")
MULTIPLY_ROWS("128", 16, "64", "65", "66")
MULTIPLY_SHARES("64", 8, "%32, %33, %34, %35", "36")
MULTIPLY_SHARES("128", 16, "%64, %65, %66, %67", "68")
MULTIPLY_GROUP("32", 4, "16", "17")
MULTIPLY_GROUP("64", 8, "32", "33")
#else
template <int TILES> DEVICE void multiply_group(float (&)[TILES][4], const void*, const void*) {}
template <bool ADD, int TILES> DEVICE void multiply_rows(float (&)[TILES][4], Panels, Panels) {}
template <int TILES> DEVICE void multiply_shares(float (&)[TILES][4], const u32 (&)[4], Panels) {}
#endif
#undef HIGH_WORD
#undef SUMS
#undef SUMS_OF_4
#undef SUMS_OF_8
#undef SUMS_OF_16
#undef PLACES_OF_4
#undef PLACES_OF_8
#undef PLACES_OF_16
#undef MULTIPLY_ROWS
#undef MULTIPLY_GROUP
#undef MULTIPLY_SHARES

DEVICE void start_group() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
DEVICE void end_group() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most PENDING groups of products are pending.
template <int PENDING> DEVICE void wait_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}
// Keeps uses of c before and after this place apart, for the compiler.
template <int TILES> DEVICE void settle(float (&c)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
        asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}
// Makes this thread's completed copies visible to products, after a barrier.
DEVICE void publish_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// -------------------------------------------------------------------------------- parts of a block

// A barrier of `threads` threads; `part`: 1 to 15.  Those that arrive do not wait.
DEVICE void sync_part(int part, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(part), "r"(threads) : "memory");
}
DEVICE void arrive_part(int part, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(part), "r"(threads) : "memory");
}
// Sets a warpgroup's registers for each thread.
template <int REGISTERS> DEVICE void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}
template <int REGISTERS> DEVICE void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}
DEVICE void arrive(u64* arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(
                     static_cast<u32>(__cvta_generic_to_shared(arrivals)))
                 : "memory");
#endif
}

// ------------------------------------------------------------------------------- boxes of a tensor

// Makes the description of a tensor of bfloat16, [2, lines, rows, width], whose lines and parts are `line` and
// `half` bytes apart, for boxes of `tile` rows and 64 columns.  A warp calls it; `map` and `made`, which is in shared memory, have 128
// bytes and begin at multiples of 128.
DEVICE void make_map(void* map, void* made, const void* from, u32 width, u32 rows, u32 tile, u32 lines, u64 line,
                     u64 half) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SET(field, value) asm volatile("tensormap.replace.tile." field ";" ::"r"(at), value : "memory")
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(made)), lane = threadIdx.x % 32;
    static_cast<u32*>(made)[lane] = 0;
    __syncwarp();
    if (lane == 0) {
        SET("global_address.shared::cta.b1024.b64 [%0], %1", "l"(from));
        SET("rank.shared::cta.b1024.b32 [%0], %1", "r"(3));  // less one
        SET("box_dim.shared::cta.b1024.b32 [%0], 0, %1", "r"(64));
        SET("box_dim.shared::cta.b1024.b32 [%0], 1, %1", "r"(tile));
        SET("box_dim.shared::cta.b1024.b32 [%0], 2, %1", "r"(1));
        SET("box_dim.shared::cta.b1024.b32 [%0], 3, %1", "r"(1));
        SET("global_dim.shared::cta.b1024.b32 [%0], 0, %1", "r"(width));
        SET("global_dim.shared::cta.b1024.b32 [%0], 1, %1", "r"(rows));
        SET("global_dim.shared::cta.b1024.b32 [%0], 2, %1", "r"(lines));
        SET("global_dim.shared::cta.b1024.b32 [%0], 3, %1", "r"(2));
        SET("global_stride.shared::cta.b1024.b64 [%0], 0, %1", "l"(static_cast<u64>(width) * 2));
        SET("global_stride.shared::cta.b1024.b64 [%0], 1, %1", "l"(line));
        SET("global_stride.shared::cta.b1024.b64 [%0], 2, %1", "l"(half));
        SET("element_stride.shared::cta.b1024.b32 [%0], 0, %1", "r"(1));
        SET("element_stride.shared::cta.b1024.b32 [%0], 1, %1", "r"(1));
        SET("element_stride.shared::cta.b1024.b32 [%0], 2, %1", "r"(1));
        SET("element_stride.shared::cta.b1024.b32 [%0], 3, %1", "r"(1));
        SET("elemtype.shared::cta.b1024.b32 [%0], %1", "n"(10));       // bfloat16
        SET("interleave_layout.shared::cta.b1024.b32 [%0], %1", "n"(0));
        SET("swizzle_mode.shared::cta.b1024.b32 [%0], %1", "n"(3));    // 128 bytes
        SET("fill_mode.shared::cta.b1024.b32 [%0], %1", "n"(0));       // zeros
    }
#undef SET
    __syncwarp();
    asm volatile(
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
        "[%0], [%1], 128;\n\t"
        "fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map), "r"(at)
        : "memory");
#endif
}
// Copies a box to a panel, and counts its bytes in `arrivals`, also those of rows behind the last, which are
// zeros.
DEVICE void copy_box(void* to, const void* map, int column, int row, int line, int half, u64* arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(static_cast<u32>(__cvta_generic_to_shared(to))),
        "l"(map), "r"(column), "r"(row), "r"(line), "r"(half),
        "r"(static_cast<u32>(__cvta_generic_to_shared(arrivals)))
        : "memory");
#endif
}

#endif  // EMULATED

// What the persistent step stands on: bulk copies that a barrier in shared memory counts, barriers of
// some of a block's warps, and words that blocks hand to each other.
//
// Tagged words.  A value goes from block to block as one 32-bit word whose lowest bit is a tag; the
// rest is a float32 without its last bit of mantissa (infinities and NaN stay what they are).  Each
// word is written once a turn, and its tag changes every turn; so a reader that knows the turn asks
// for the word itself until the tag is right, and needs no flag, no fence and no order between
// words.  One trip to L2 instead of two.  What this rests on:
// * a word of the turn before the last is never seen again: the reader itself took the last one, and
//   reads of one address do not go back (coherence), nor do they over the end of a kernel;
// * a word is written for the next turn only after all have read it: see persistent.cu.
#pragma once

#include "common.cuh"

#ifndef EMULATED

typedef u64 Counted;  // a barrier in shared memory that counts arrivals and bytes

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEVICE void counted_init(Counted* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}
// Makes the barriers' first state known to the copies.
DEVICE void counted_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void counted_arrive(Counted* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}
DEVICE void counted_expect(Counted* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
DEVICE bool counted_done(Counted* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}

// The same, without a pause.
DEVICE bool counted_test(Counted* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}

// Weights are read once a step: they should not push out what is read again.
DEVICE u64 streaming_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, Counted* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// 16 bytes into shared memory, there after `copied` for the thread that asked.
DEVICE void copy_ahead(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
DEVICE void copied() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The compiler knows nothing about the value from here on.
DEVICE void opaque(u32*& p) { asm volatile("" : "+l"(p)); }
DEVICE void opaque(int& n) { asm volatile("" : "+r"(n)); }

DEVICE void sync_threads_of(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

DEVICE void publish(u32* p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void publish(u32* p, u32 v, u32 w) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v), "r"(w)
                 : "memory");
}
DEVICE uint4 peek(const uint4* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
DEVICE uint2 peek(const uint2* p) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(p)
                 : "memory");
    return v;
}

// In a loop that waits.  PERSISTENT_LIMIT: so many turns, and the kernel gives up (for debugging).
DEVICE void waiting(u32& turns) {
#ifdef PERSISTENT_LIMIT
    if (++turns > PERSISTENT_LIMIT) __trap();
#endif
}

// To 2 units in the last place, for denominators below 2^126.
DEVICE float fast_divide(float a, float b) { return __fdividef(a, b); }

#ifdef PERSISTENT_PROFILE
DEVICE long long now() { return clock64(); }
#endif

#endif  // EMULATED

DEVICE void counted_wait(Counted* barrier, u32 parity) {
    u32 turns = 0;
    while (!counted_done(barrier, parity)) waiting(turns);
}

DEVICE u32 tagged(float value, u32 tag) { return (__float_as_uint(value) & ~1u) | tag; }
DEVICE float untagged(u32 word) { return __uint_as_float(word & ~1u); }
DEVICE float4 untagged(const uint4& v) {
    return make_float4(untagged(v.x), untagged(v.y), untagged(v.z), untagged(v.w));
}
DEVICE bool is_of(const uint4& v, u32 tag) {
    return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 1u) == 0;
}
DEVICE bool is_of(const uint2& v, u32 tag) { return (((v.x ^ tag) | (v.y ^ tag)) & 1u) == 0; }

// Waits until the words that `v` was read from are of this turn.
template <class V> DEVICE void settle(V& v, const V* p, u32 tag) {
    u32 turns = 0;
    while (!is_of(v, tag)) {
        waiting(turns);
        v = peek(p);
    }
}

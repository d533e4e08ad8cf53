// A hash join: count, scan, materialize.  Every kernel reads its sizes and addresses from one block in
// device memory (layout.cuh, generated from ostinato/relational/block.py), so that one captured graph
// serves every join of its key.
//
//   begin        copies the block of this join from the host's ring
//   insert       finds or claims, for each right row, the slot of its key and a place in the slot's group
//   starts       allots to each group its part of `grouped`
//   probe        looks up the slot of each left row, and scans the counts within blocks.  The blocks after
//                these put right rows into their groups, as `fill` does
//   scan, add    compute the upper levels of the scan; the last `scan` compares the total with the capacity
//   materialize  adds the lowest level's block sums to the offsets as it reads them, and writes pairs of
//                row numbers, the same number in each block.  The blocks after these clear the table
//
// Memory rules:
// * The block written by `begin` and the input columns do not change until the graph ends, and are read with
//   ordinary loads: `begin` starts only when all earlier work has ended, so L1 holds no stale line of
//   them.  No pointer to them is __restrict__, or the loads could move to before the wait.
// * Data that other kernels of the graph write is read past L1 (`fresh`): a kernel may become resident
//   before the previous one has ended (programmatic launch), so L1 may hold stale lines.
// * Every block first waits for the previous kernel, even a block without work: the next kernel's wait then
//   covers all earlier kernels.
typedef unsigned int u32;
typedef unsigned long long u64;
#ifndef EMULATED  // tests compile this file as C++ and define these otherwise
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define fresh(p) __ldcg(p)
DEVICE uint4 fresh4(const void* p) { return __ldcg(static_cast<const uint4*>(p)); }
DEVICE void publish(volatile u64* p, u64 v) { *p = v; }
#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_previous() {}
DEVICE void start_next() {}
#endif
#endif

#include "layout.cuh"

constexpr u32 THREADS = 256, WARPS = THREADS / 32, FULL = 0xffffffffu;
constexpr u32 ITEMS = TILE / THREADS;
constexpr u32 SPAN = 2048;  // the most left rows that `materialize` keeps in shared memory
constexpr u32 STRIDE = TILE + THREADS;  // left rows that `materialize` reads at a time
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr u32 RESIDENT = 8;  // blocks of `materialize` on a multiprocessor: the most threads it can hold
#else
constexpr u32 RESIDENT = 4;  // with more blocks the compiler spills registers
#endif
static_assert(TILE % THREADS == 0, "tile");

template <class T> DEVICE T* pointer(u64 address) { return reinterpret_cast<T*>(address); }

DEVICE void begin_kernel() {
    wait_for_previous();
    start_next();
}

// ------------------------------------------------------------------------------------------- keys

DEVICE u64 mixed(u64 h) {  // the finalizer of MurmurHash3
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdull;
    h ^= h >> 33;
    h *= 0xc4ceb9fe1a85ec53ull;
    return h ^ h >> 33;
}

// The key columns of a join, as written by the host; they do not change after `begin`.
struct Keys {
    const Column* columns;
    u32 arity;

    DEVICE explicit Keys(const Block* block)
        : columns(reinterpret_cast<const Column*>(block + 1)), arity(block->arity) {}

    DEVICE static u64 value(u64 address, u32 nbytes, u32 row) {
        return nbytes == 8 ? pointer<const u64>(address)[row] : pointer<const u32>(address)[row];
    }
    template <bool RIGHT> DEVICE u64 hash(u32 row) const {
        u64 h = 0;
        for (u32 c = 0; c < arity; c++) {
            const u64 address = RIGHT ? columns[c].right : columns[c].left;
            h = mixed(h + 0x9e3779b97f4a7c15ull + value(address, columns[c].nbytes, row));
        }
        return h;
    }
    // True if a row of the left (with RIGHT: of the right) side has the key of a right row.
    template <bool RIGHT> DEVICE bool same(u32 row, u32 right) const {
        for (u32 c = 0; c < arity; c++) {
            const u64 other = columns[c].right;
            const u64 own = RIGHT ? other : columns[c].left;
            const u32 nbytes = columns[c].nbytes;
            if (value(own, nbytes, row) != value(other, nbytes, right)) return false;
        }
        return true;
    }
};

DEVICE u32 tag_of(u64 hash) { return static_cast<u32>(hash >> 32); }

// ------------------------------------------------------------------------------------------- scan

// Returns the sum of `value` over the threads before this one; `sum` is the sum over all threads.  All threads
// must call it.
DEVICE u64 scanned(u64 value, u64& sum) {
    __shared__ u64 warps[WARPS];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 upto = value;
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u64 other = __shfl_up_sync(FULL, upto, distance);
        if (lane >= distance) upto += other;
    }
    __syncthreads();  // all threads have read `warps` of the previous call
    if (lane == 31) warps[warp] = upto;
    __syncthreads();
    u64 before = 0;
    sum = 0;
    for (u32 w = 0; w < WARPS; w++) {
        if (w < warp) before += warps[w];
        sum += warps[w];
    }
    return before + upto - value;
}

DEVICE void set_total(Block* block, u64 total) {
    block->total = total;
    block->overflow = total > block->capacity;
}

// ------------------------------------------------------------------------------------------ kernels

// One block.  `state`: number of joins that began so far.  The entry of the ring must belong to the next join;
// if not (something other than the joiner launched the graph), the block becomes empty, and `state` stays.
KERNEL __launch_bounds__(THREADS) begin(const u64* ring, u64* state, Block* block, u32 words) {
    const u64 turn = fresh(state);
    const volatile u64* const entry = ring + turn % RING_DEPTH * (RING_PITCH / 8);
    u64* const own = reinterpret_cast<u64*>(block);
    const bool next = entry[0] == turn + 1;
    for (u32 i = threadIdx.x; i < words; i += THREADS) {
        const u64 word = entry[i];
        own[i] = next ? word : 0;
    }
    __syncthreads();  // all threads have read `state`
    if (threadIdx.x == 0 && next) *state = turn + 1;
    start_next();
}

KERNEL __launch_bounds__(THREADS) insert(Block* block) {
    begin_kernel();
    const Keys keys(block);
    const u64 rows = block->right_rows;
    const u32 mask = block->mask;
    Slot* const slots = pointer<Slot>(block->slots);
    u32* const slot_of = pointer<u32>(block->slot_of);
    u32* const rank = pointer<u32>(block->rank);
    const u32 lane = threadIdx.x % 32;
    // Reading a slot before claiming it saves atomics of rows with equal keys.  With few rows the atomics cost
    // less than the reads.
    const bool look = rows > 1 << 16;
    for (u64 first = static_cast<u64>(blockIdx.x) * THREADS; first < rows;
         first += static_cast<u64>(gridDim.x) * THREADS) {
        const u64 wide = first + threadIdx.x;
        const bool active = wide < rows;
        const u32 row = static_cast<u32>(wide);
        u32 at = 0;
        if (active) {
            const u64 hash = keys.hash<true>(row);
            const u64 own = static_cast<u64>(tag_of(hash)) << 32 | (row + 1);
            at = static_cast<u32>(hash) & mask;
            // The table is at most half full, so there is an empty slot.
            while (true) {
                u64* const owner = reinterpret_cast<u64*>(slots + at);
                u64 seen = look ? fresh(owner) : 0;
                if (!seen) seen = atomicCAS(owner, 0ull, own);
                if (!seen) break;
                if (static_cast<u32>(seen >> 32) == tag_of(hash) &&
                    keys.same<true>(row, static_cast<u32>(seen) - 1))
                    break;
                at = (at + 1) & mask;
            }
        }
        // Rows of a warp with the same slot are counted by one atomic, since all keys may be equal.
        const u32 peers = __match_any_sync(FULL, active ? static_cast<u64>(at) : ~0ull);
        const int leader = __ffs(peers) - 1;
        u32 before = 0;
        if (active && lane == static_cast<u32>(leader))
            before = atomicAdd(&slots[at].count, static_cast<u32>(__popc(peers)));
        before = __shfl_sync(FULL, before, leader);
        if (active) {
            slot_of[row] = at;
            rank[row] = before + __popc(peers & ((1u << lane) - 1));
        }
    }
}

KERNEL __launch_bounds__(THREADS) starts(Block* block) {
    __shared__ u32 given;
    begin_kernel();
    const u64 rows = block->right_rows;
    Slot* const slots = pointer<Slot>(block->slots);
    const u32* const slot_of = pointer<const u32>(block->slot_of);
    const u32* const rank = pointer<const u32>(block->rank);
    for (u64 first = static_cast<u64>(blockIdx.x) * THREADS; first < rows;
         first += static_cast<u64>(gridDim.x) * THREADS) {
        const u64 row = first + threadIdx.x;
        u32 at = 0, place = 1, count = 0;
        if (row < rows) {
            at = fresh(slot_of + row);
            place = fresh(rank + row);
        }
        if (place == 0) count = fresh(&slots[at].count);  // one row of each group
        u64 sum;
        const u32 before = static_cast<u32>(scanned(count, sum));
        if (threadIdx.x == 0) given = sum ? atomicAdd(&block->groups, static_cast<u32>(sum)) : 0;
        __syncthreads();
        if (count) slots[at].start = given + before;
    }  // the barriers in `scanned` keep `given` until all threads have read it
}

// Puts right rows into their groups.
DEVICE void fill_groups(const Block* block, u32 first_block) {
    const u64 rows = block->right_rows;
    const Slot* const slots = pointer<const Slot>(block->slots);
    const u32* const slot_of = pointer<const u32>(block->slot_of);
    const u32* const rank = pointer<const u32>(block->rank);
    u32* const grouped = pointer<u32>(block->grouped);
    const u64 stride = static_cast<u64>(gridDim.x - first_block) * THREADS;
    for (u64 row = static_cast<u64>(blockIdx.x - first_block) * THREADS + threadIdx.x; row < rows;
         row += stride)
        grouped[fresh(&slots[fresh(slot_of + row)].start) + fresh(rank + row)] =
            static_cast<u32>(row);
}

// The number of `blocks` blocks that have work if each takes `each` things at a time; at least 1.
DEVICE u32 busy(u64 things, u32 each, u32 blocks) {
    return static_cast<u32>(max(min((things + each - 1) / each, static_cast<u64>(blocks)), 1ull));
}

// Called by a block when its work is done; the last of `blocks` callers publishes the result to the host.
DEVICE void finish(Block* block, u32 blocks) {
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&block->ticket, 1u) != blocks - 1) return;
    __threadfence();
    Done* const done = pointer<Done>(block->done);
    if (!done) return;
    publish(&done->total, fresh(&block->total));
    publish(&done->overflow, fresh(&block->overflow));
    __threadfence_system();
    publish(&done->sequence, block->sequence);
}

KERNEL __launch_bounds__(THREADS) fill(Block* block) {
    begin_kernel();
    const u32 blocks = busy(block->right_rows, THREADS, gridDim.x);
    if (blockIdx.x >= blocks) return;
    fill_groups(block, 0);
    finish(block, blocks);
}

KERNEL __launch_bounds__(THREADS) probe(Block* block, u32 probe_blocks) {
    begin_kernel();
    if (blockIdx.x >= probe_blocks) {
        fill_groups(block, probe_blocks);
        return;
    }
    const u32 rows = block->left_rows;
    const u64 wide = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    const u32 row = static_cast<u32>(wide);
    if (wide - threadIdx.x >= rows && probe_blocks > 1) return;  // the whole block has nothing to do
    u32 count = 0, start = 0;
    if (wide < rows) {
        const Keys keys(block);
        const u32 mask = block->mask;
        const Slot* const slots = pointer<const Slot>(block->slots);
        const u64 hash = keys.hash<false>(row);
        u32 at = static_cast<u32>(hash) & mask;
        while (true) {
            const uint4 slot = fresh4(slots + at);  // row, tag, count, start
            if (!slot.x) break;
            if (slot.y == tag_of(hash) && keys.same<false>(row, slot.x - 1)) {
                count = slot.z;
                start = slot.w;
                break;
            }
            at = (at + 1) & mask;
        }
    }
    u64 sum;
    const u64 before = scanned(count, sum);
    if (wide < rows) {
        // The offset within the block.  If it exceeds 32 bits, so does the total, and no offset is read.
        pointer<u32>(block->offsets)[row] = static_cast<u32>(before);
        pointer<u32>(block->found)[row] = start;
    }
    if (threadIdx.x == 0) {
        if (probe_blocks == 1) set_total(block, sum);
        if (rows) pointer<u64>(block->sums)[blockIdx.x] = probe_blocks == 1 ? 0 : sum;
    }
}

// The number of elements of a level of the scan; level 0 is the left rows.
DEVICE u64 level_size(const Block* block, u32 level) {
    return (block->left_rows + (1ull << 8 * level) - 1) >> 8 * level;
}

// Scans level `level` of the block sums, which begins at index `own`, within blocks; a block's sum goes to the
// level above, which begins at `above`.
KERNEL __launch_bounds__(THREADS) scan(Block* block, u32 level, u32 own, u32 above) {
    begin_kernel();
    const u64 size = level_size(block, level);
    const u64 at = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    if (at - threadIdx.x >= size && gridDim.x > 1) return;
    u64* const sums = pointer<u64>(block->sums);
    u64 sum;
    const u64 before = scanned(at < size ? fresh(sums + own + at) : 0, sum);
    if (at < size) sums[own + at] = before;
    if (threadIdx.x == 0) {
        if (gridDim.x == 1) {
            set_total(block, sum);
        } else {
            sums[above + blockIdx.x] = sum;
        }
    }
}

// Adds the level above, from index `above` on, to level `level` (1 or more) of the block sums, from `own` on.
KERNEL __launch_bounds__(THREADS) add(Block* block, u32 level, u32 own, u32 above) {
    begin_kernel();
    const u64 at = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= level_size(block, level)) return;
    u64* const sums = pointer<u64>(block->sums);
    sums[own + at] = fresh(sums + own + at) + fresh(sums + above + blockIdx.x);
}

// The number of rows of the result that this join writes.
DEVICE u64 written(const Block* block) {
    const u64 total = fresh(&block->total);
    return fresh(&block->overflow) ? 0 : total;
}

// The offsets in the output at which the matches of left rows start.
struct Offsets {
    const u32* in_block;
    const u64* blocks;

    DEVICE explicit Offsets(const Block* block)
        : in_block(pointer<const u32>(block->offsets)), blocks(pointer<const u64>(block->sums)) {}
    DEVICE u32 operator[](u32 row) const {  // a total that fits the output fits 32 bits
        return static_cast<u32>(fresh(blocks + row / THREADS)) + fresh(in_block + row);
    }
};

// Returns the index of the last of `size` block sums that is `output` or less; the first sum is 0.  All threads
// of a block search together.
DEVICE u32 last_block(const u64* sums, u32 size, u32 output) {
    u32 first = 0;
    while (size > 1) {
        const u32 step = (size + THREADS - 1) / THREADS;
        const u64 ahead = static_cast<u64>(threadIdx.x) * step;
        const bool passed = ahead < size && fresh(sums + first + ahead) <= output;
        const u32 skipped = (__syncthreads_count(passed) - 1) * step;
        size = min(step, size - skipped);
        first += skipped;
    }
    return first;
}

KERNEL __launch_bounds__(THREADS, RESIDENT) materialize(Block* block, u32 tile_blocks) {
    __shared__ u32 near[SPAN], places[SPAN], last_row;
    begin_kernel();
    const u64 slot_count = static_cast<u64>(block->mask) + 1;
    const u32 others = gridDim.x - tile_blocks;
    const u32 clearing = block->clear && others ? busy(slot_count, THREADS, others) : 0;
    if (blockIdx.x >= tile_blocks) {  // the probe is over: clear the table for the next join
        const u32 own = blockIdx.x - tile_blocks;
        if (own >= clearing) return;
        uint4* const slots = pointer<uint4>(block->slots);
        for (u64 at = own * THREADS + threadIdx.x; at < slot_count; at += clearing * THREADS)
            slots[at] = make_uint4(0, 0, 0, 0);
        finish(block, busy(written(block), TILE, tile_blocks) + clearing);
        return;
    }
    const u64 total = written(block);
    const u32 tiling = busy(total, TILE, tile_blocks);
    if (blockIdx.x >= tiling) return;
    const Offsets offsets(block);
    const u32* const found = pointer<const u32>(block->found);
    const u32* const grouped = pointer<const u32>(block->grouped);
    u32* const left_out = pointer<u32>(block->left_out);
    u32* const right_out = pointer<u32>(block->right_out);
    const u32 rows = block->left_rows;
    const u32 row_blocks = static_cast<u32>((static_cast<u64>(rows) + THREADS - 1) / THREADS);
    // Each block has consecutive tiles.
    const u64 tiles = (total + TILE - 1) / TILE, each = (tiles + tile_blocks - 1) / tile_blocks;
    const u64 begin = blockIdx.x * each * TILE, stop = min(begin + each * TILE, total);
    // A row whose matches start at or before the tile.
    u32 first = begin < stop && rows > SPAN
                    ? last_block(offsets.blocks, row_blocks, static_cast<u32>(begin)) * THREADS
                    : 0;
    for (u64 start = begin; start < stop; start += TILE) {
        const u32 end = static_cast<u32>(min(start + TILE, total));
        // Rows from `first` on, up to one whose matches start behind the tile.  `near`: the start of a row's
        // matches.  `places`: the difference between the place in `grouped` and the output's number.
        const u32 most = min(rows - first, SPAN);
        u32 span = 0;
        do {
            const u32 next = min(span + STRIDE, most);
            for (u32 i = span + threadIdx.x; i < next; i += THREADS) {
                const u32 offset = offsets[first + i];
                near[i] = offset;
                places[i] = fresh(found + first + i) - offset;
            }
            __syncthreads();
            span = next;
        } while (span < most && near[span - 1] < end);
        // If many rows have no match, not all of them fit; the offsets are read from memory then.
        const bool close = first + span == rows || near[span - 1] >= end;
        if (!close) {
            const u64 last = last_block(offsets.blocks, row_blocks, end - 1);
            span = static_cast<u32>(min((last + 1) * THREADS, static_cast<u64>(rows))) - first;
        }
        // All items of a thread are searched together, so that their reads overlap.
        u32 output[ITEMS];
        u32 at[ITEMS];  // left rows, counted from `first`
#pragma unroll
        for (u32 i = 0; i < ITEMS; i++) {
            output[i] = min(static_cast<u32>(start) + i * THREADS + threadIdx.x, end - 1);
            at[i] = 0;
        }
        for (u32 ahead = span > 1 ? 1u << (31 - __clz(span - 1)) : 0; ahead; ahead /= 2) {
#pragma unroll
            for (u32 i = 0; i < ITEMS; i++) {
                const u32 next = at[i] + ahead;
                if (next < span && (close ? near[next] : offsets[first + next]) <= output[i])
                    at[i] = next;
            }
        }
        u32 place[ITEMS];
#pragma unroll
        for (u32 i = 0; i < ITEMS; i++) {
            const u32 row = first + at[i];
            place[i] = output[i] + (close ? places[at[i]] : fresh(found + row) - offsets[row]);
        }
#pragma unroll
        for (u32 i = 0; i < ITEMS; i++) {
            const u32 right = fresh(grouped + place[i]);
            if (start + i * THREADS + threadIdx.x < end) {
                left_out[output[i]] = first + at[i];
                right_out[output[i]] = right;
            }
        }
        // The next tile's matches belong to the last output's row or to later rows.
        if (threadIdx.x == THREADS - 1) last_row = first + at[ITEMS - 1];
        __syncthreads();  // all threads have read `near` and `places`
        first = last_row;
    }
    finish(block, tiling + clearing);
}

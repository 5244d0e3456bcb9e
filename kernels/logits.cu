// Index logits over paged keys: logits[b, s] = sum over h of weight[b, h] * relu(query[b, h, :] . key[s, :]), f32.
//
// 64 heads of 128 dimensions; a page holds 64 keys. bf16 pages are [64, 128]; e4m3 pages are [64, 128] bytes and then 64
// f32 scales, and a key's scale multiplies its sum last. Keys past a row's length never reach an output.
//
// One read of the keys is the floor: 64 FLOP a byte in bf16, 121 in e4m3, both below the tensor cores' balance. Keys are the
// matrix's 64 rows, heads its 64 columns, so that the sum over heads is a sum over a thread's own registers and two
// shuffles. Three readers:
//
// - paged: for many pages. A persistent grid splits the pages of all rows evenly over the multiprocessors, warps keep a deep
//   ring of pages in flight with the bulk tensor copy engine, and warpgroups take turns at the pages.
// - stream, page: for few. Small blocks read keys straight into the registers of the multiplication.
// - direct: plain, for devices before and after Hopper, and the fallback, which fills up with negative infinity.

#include "common.cuh"

#define HEADS 64
#define DIMS 128
#define PAGE 64

// The share of a 64 x 64 product that a thread holds: rows lane / 4 and lane / 4 + 8 of its warp's 16, and of each 8
// columns the pair at 2 * (lane % 4).
__device__ __forceinline__ void load_weights(float (&weight)[16], const float *weights, int groups, int lane) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= groups) break;
    float2 pair = *reinterpret_cast<const float2 *>(weights + j * 8 + (lane & 3) * 2);
    weight[2 * j] = pair.x;
    weight[2 * j + 1] = pair.y;
  }
}

template <bool ALL>
__device__ __forceinline__ float2 weigh(const float (&product)[32], const float (&weight)[16], int groups) {
  float2 upper = {0.f, 0.f}, lower = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (!ALL && j >= groups) break;
    upper.x += fmaxf(product[4 * j], 0.f) * weight[2 * j];
    upper.y += fmaxf(product[4 * j + 1], 0.f) * weight[2 * j + 1];
    lower.x += fmaxf(product[4 * j + 2], 0.f) * weight[2 * j];
    lower.y += fmaxf(product[4 * j + 3], 0.f) * weight[2 * j + 1];
  }
  float2 sum = {upper.x + upper.y, lower.x + lower.y};
#pragma unroll
  for (int step = 1; step <= 2; step <<= 1) {
    sum.x += __shfl_xor_sync(FULL_WARP, sum.x, step);
    sum.y += __shfl_xor_sync(FULL_WARP, sum.y, step);
  }
  return sum;
}

// Groups of eight heads past `groups` carry ballast: they are multiplied, as in a real layer, and never summed, so that no
// NaN in them can reach a logit.
__device__ __forceinline__ float2 weigh_live(const float (&product)[32], const float (&weight)[16], int groups) {
  return groups == 8 ? weigh<true>(product, weight, 8) : weigh<false>(product, weight, groups);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#ifndef STAGES_BF16
#define STAGES_BF16 8
#endif
#ifndef STAGES_E4M3
#define STAGES_E4M3 16
#endif
#ifndef CONSUMERS
#define CONSUMERS 4
#endif
// Each warpgroup has a warp that copies for it: one for all cannot issue copies as fast as e4m3 pages can arrive.
#define RING_THREADS (128 * CONSUMERS + 32 * CONSUMERS)

#define PRODUCT_REGISTERS(d)                                                                                            \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),           \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),            \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),           \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define PRODUCT_LIST                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "     \
  "%24, %25, %26, %27, %28, %29, %30, %31}"

__device__ __forceinline__ void multiply_bf16(float (&d)[32], u64 keys, u64 queries, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " PRODUCT_LIST ", %32, %33, p, 1, 1, 0, 0;\n}"
               : PRODUCT_REGISTERS(d)
               : "l"(keys), "l"(queries), "r"(accumulate));
}

__device__ __forceinline__ void multiply_e4m3(float (&d)[32], u64 keys, u64 queries, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " PRODUCT_LIST ", %32, %33, p, 1, 1;\n}"
               : PRODUCT_REGISTERS(d)
               : "l"(keys), "l"(queries), "r"(accumulate));
}

// A shared-memory tile of 64 rows of 128 bytes, swizzled by 128 bytes, contiguous along the summed dimension.
__device__ __forceinline__ u64 tile(u32 address) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

template <bool E4M3>
struct Shape {
  static constexpr u32 stages = E4M3 ? STAGES_E4M3 : STAGES_BF16;
  static constexpr u32 key_bytes = PAGE * DIMS * (E4M3 ? 1 : 2);
  static constexpr u32 query_bytes = HEADS * DIMS * (E4M3 ? 1 : 2);
  static constexpr u32 scale_bytes = E4M3 ? PAGE * 4 : 0;
  static constexpr u32 page_bytes = key_bytes + scale_bytes;
  // Copies land in any order. Only where each stage serves one warpgroup can none run a whole phase ahead of a barrier.
  static_assert(stages % CONSUMERS == 0, "stages are shared between warpgroups");
};

// Pages before each row, of all rows; and each row's length in keys.
struct Plan {
  int *before;
  int *length;
};

__device__ __forceinline__ void make_plan(Plan plan, const int *positions, int shift, int rows) {
  constexpr int DEEP = 4;
  int lane = threadIdx.x & 31, carry = 0;
  for (int start = 0; start < rows; start += 32 * DEEP) {
    int length[DEEP], pages[DEEP], own = 0;
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      int row = start + lane * DEEP + i;
      length[i] = row < rows ? max(positions[row] + 1, 0) >> shift : 0;
    }
#pragma unroll
    for (int i = 0; i < DEEP; ++i) own += pages[i] = (length[i] + PAGE - 1) / PAGE;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      int other = __shfl_up_sync(FULL_WARP, sum, step);
      if (lane >= step) sum += other;
    }
    int before = carry + sum - own;
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      int row = start + lane * DEEP + i;
      before += pages[i];
      if (row < rows) {
        plan.before[row + 1] = before;
        plan.length[row] = length[i];
      }
    }
    carry += __shfl_sync(FULL_WARP, sum, 31);
  }
  if (lane == 0) plan.before[0] = 0;
}

// The last row that starts at or before `page` and is not empty.
__device__ __forceinline__ int row_of(const int *before, int rows, int page) {
  int low = 0, high = rows - 1;
  while (low < high) {
    int middle = (low + high) / 2;
    if (before[middle + 1] > page) high = middle;
    else low = middle + 1;
  }
  return low;
}

template <bool E4M3>
__device__ __forceinline__ void paged_logits(const TensorMap &keys, const TensorMap &queries, const u8 *pages,
                                             const float *weights, int weight_stride, int groups, const int *positions,
                                             int shift, const int *table, int table_stride, float *logits,
                                             int logits_stride, int rows) {
  using S = Shape<E4M3>;
  extern __shared__ u8 raw[];
  u8 *ring = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
  u8 *query_tiles = ring + S::stages * S::key_bytes;
  u8 *scales = query_tiles + 2 * S::query_bytes;
  u64 *barriers = reinterpret_cast<u64 *>(scales + S::stages * S::scale_bytes);
  Plan plan = {reinterpret_cast<int *>(barriers + 2 * S::stages + 4), 0};
  plan.length = plan.before + rows + 1;
  u32 filled = shared_address(barriers), drained = filled + 8 * S::stages;
  u32 query_filled = drained + 8 * S::stages, query_drained = query_filled + 16;

  int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  if (warp == 4 * CONSUMERS) {
    if (lane == 0) {
      asm volatile("prefetch.tensormap [%0];" ::"l"(&keys) : "memory");
      asm volatile("prefetch.tensormap [%0];" ::"l"(&queries) : "memory");
      for (u32 i = 0; i < S::stages; ++i) {
        barrier_init(filled + 8 * i, 1);
        barrier_init(drained + 8 * i, 4);
      }
      for (u32 i = 0; i < 2; ++i) {
        barrier_init(query_filled + 8 * i, 1);
        barrier_init(query_drained + 8 * i, 4 * CONSUMERS);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    make_plan(plan, positions, shift, rows);
    __syncwarp();
    // It announces plan and barriers, and waits for nobody.
    asm volatile("bar.arrive 1, %0;" ::"n"(RING_THREADS) : "memory");
  } else {
    asm volatile("bar.sync 1, %0;" ::"n"(RING_THREADS) : "memory");
  }

  int total = plan.before[rows];
  int first = static_cast<int>(static_cast<u64>(total) * blockIdx.x / gridDim.x);
  int last = static_cast<int>(static_cast<u64>(total) * (blockIdx.x + 1) / gridDim.x);
  if (first == last) return;
  int row = row_of(plan.before, rows, first);

  if (warp >= 4 * CONSUMERS) {
    // Copies the pages of one warpgroup; the first such warp copies the queries too.
    int group = warp - 4 * CONSUMERS;
    // Each lane looks one page of the next 32 up, a batch ahead of the copies, so that no copy waits for the table.
    int look = row, page = first + group + CONSUMERS * lane, next = 0;
    auto lookup = [&]() {
      if (page < last) {
        while (plan.before[look + 1] <= page) ++look;
        next = table[static_cast<u64>(look) * table_stride + page - plan.before[look]];
      }
      page += 32 * CONSUMERS;
    };
    lookup();
    int turn = -1, loaded = row - 1;
    auto load_queries = [&](int upto) {
      while (loaded < upto) {
        ++loaded;
        if (plan.before[loaded + 1] == plan.before[loaded]) continue;
        ++turn;
        u32 slot = turn & 1;
        barrier_wait(query_drained + 8 * slot, ((turn >> 1) & 1) ^ 1);
        barrier_expect(query_filled + 8 * slot, S::query_bytes);
        u32 target = shared_address(query_tiles + slot * S::query_bytes);
        copy_tile(target, queries, query_filled + 8 * slot, 0, 0, loaded, EVICT_LAST);
        if (!E4M3) copy_tile(target + S::query_bytes / 2, queries, query_filled + 8 * slot, DIMS / 2, 0, loaded, EVICT_LAST);
      }
    };
    u32 stage = group, parity = 1;
    for (int batch = first + group; batch < last; batch += 32 * CONSUMERS) {
      int current = next;
      lookup();
      for (int i = 0; i < 32 && batch + CONSUMERS * i < last; ++i) {
        int id = __shfl_sync(FULL_WARP, current, i);
        if (lane == 0) {
          barrier_wait(drained + 8 * stage, parity);
          u32 barrier = filled + 8 * stage;
          barrier_expect(barrier, S::page_bytes);
          if (E4M3) {
            copy_tile(shared_address(ring + stage * S::key_bytes), keys, barrier, 0, 0, id, EVICT_FIRST);
            copy_bytes(shared_address(scales + stage * S::scale_bytes),
                       pages + static_cast<u64>(id) * S::page_bytes + S::key_bytes, S::scale_bytes, barrier, EVICT_FIRST);
          } else {
            u32 target = shared_address(ring + stage * S::key_bytes);
            copy_tile(target, keys, barrier, 0, id * PAGE, 0, EVICT_FIRST);
            copy_tile(target + S::key_bytes / 2, keys, barrier, DIMS / 2, id * PAGE, 0, EVICT_FIRST);
          }
          if (group == 0) {
            while (plan.before[row + 1] <= batch + CONSUMERS * i) ++row;
            load_queries(row);
          }
        }
        stage += CONSUMERS;
        if (stage >= S::stages) {
          stage -= S::stages;
          parity ^= 1;
        }
      }
    }
    if (group == 0 && lane == 0) {
      while (plan.before[row + 1] < last) ++row;
      load_queries(row);
    }
    return;
  }

  int group = warp / 4;
  int key = (warp & 3) * 16 + lane / 4 + (lane & 1) * 8;
  int page = first + group;
  u32 stage = group, parity = 0;
  for (int turn = 0; plan.before[row] < last; ++row) {
    if (plan.before[row + 1] == plan.before[row]) continue;
    float weight[16];
    load_weights(weight, weights + static_cast<u64>(row) * weight_stride, groups, lane);
    u32 slot = turn & 1;
    barrier_wait(query_filled + 8 * slot, (turn >> 1) & 1);
    u64 query = tile(shared_address(query_tiles + slot * S::query_bytes));
    int end = min(last, plan.before[row + 1]);
    for (; page < end; page += CONSUMERS) {
      barrier_wait(filled + 8 * stage, parity);
      u64 keys_tile = tile(shared_address(ring + stage * S::key_bytes));
      int position = (page - plan.before[row]) * PAGE + key;
      float scale = E4M3 ? reinterpret_cast<const float *>(scales + stage * S::scale_bytes)[key] : 1.f;
      float product[32];
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      if (E4M3) {
#pragma unroll
        for (int step = 0; step < 4; ++step) multiply_e4m3(product, keys_tile + 2 * step, query + 2 * step, step);
      } else {
#pragma unroll
        for (int step = 0; step < 8; ++step) {
          u32 offset = (step / 4) * (PAGE * 128 / 16) + (step % 4) * 2;
          multiply_bf16(product, keys_tile + offset, query + offset, step);
        }
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" : PRODUCT_REGISTERS(product)::"memory");
      if (lane == 0) barrier_arrive(drained + 8 * stage);
      float2 sum = weigh_live(product, weight, groups);
      float value = (lane & 1) ? sum.y : sum.x;
      if (E4M3) value *= scale;
      if ((lane & 2) == 0 && position < plan.length[row]) logits[static_cast<u64>(row) * logits_stride + position] = value;
      stage += CONSUMERS;
      if (stage >= S::stages) {
        stage -= S::stages;
        parity ^= 1;
      }
    }
    if (lane == 0) barrier_arrive(query_drained + 8 * slot);
    ++turn;
  }
}

#define PAGED_LOGITS(name, e4m3)                                                                                        \
  extern "C" __global__ void __launch_bounds__(RING_THREADS, 1)                                                 \
      name(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap queries, const u8 *pages,          \
           const float *weights, int weight_stride, int groups, const int *positions, int shift, const int *table,      \
           int table_stride, float *logits, int logits_stride, int rows) {                                              \
    paged_logits<e4m3>(keys, queries, pages, weights, weight_stride, groups, positions, shift, table, table_stride,     \
                       logits, logits_stride, rows);                                                                    \
  }

PAGED_LOGITS(paged_mqa_logits_bf16, false)
PAGED_LOGITS(paged_mqa_logits_e4m3, true)

// Loads that stay in the order they are written in: what a short launch takes is the order of its first loads. The
// assembler moves them freely within a block of code, so `hold` ends one.
__device__ __forceinline__ int load_word(const int *from) {
  int word;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

__device__ __forceinline__ float2 load_pair(const float *from) {
  float2 pair;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "l"(from) : "memory");
  return pair;
}

__device__ __forceinline__ uint4 load_piece(const u8 *from) {
  uint4 piece;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
               : "l"(from)
               : "memory");
  return piece;
}

__device__ __forceinline__ uint4 load_key_piece(const u8 *from) {
  uint4 piece;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
               : "l"(from), "l"(EVICT_FIRST)
               : "memory");
  return piece;
}

__device__ __forceinline__ void hold() { __syncwarp(); }

__device__ __forceinline__ void multiply_held(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 queries, int accumulate,
                                              bool e4m3) {
  if (e4m3) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " PRODUCT_LIST
                 ", {%32, %33, %34, %35}, %36, p, 1, 1;\n}"
                 : PRODUCT_REGISTERS(d)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(queries), "r"(accumulate));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " PRODUCT_LIST
                 ", {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : PRODUCT_REGISTERS(d)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(queries), "r"(accumulate));
  }
}

// The reader of few pages. A block takes `span` pages of a row, at most 32; the keys go from memory to the registers of the
// multiplication, and several blocks a multiprocessor hide each other's latency. Nothing is set up before the first load,
// and nothing is loaded later than what it depends on allows: position, table, query and weights together, then the keys.
// A row that is shorter than its table's width is split evenly over its blocks, at the cost of one more look-up.
//
// A thread's 16-byte pieces of its two keys hold four words of each of four steps of the multiplication; queries are stored
// to match, each 4 x 4 words of a head transposed on the way to shared memory. A sum does not mind the order.
//
// ONE: `span` is 1, and the code has no loop.
template <bool E4M3, bool ONE>
__device__ __forceinline__ void stream_logits(const int *positions, const int *table, const u8 *queries, const u8 *pages,
                                              int table_stride, int query_stride, int shift, int span,
                                              const float *weights, float *logits, int weight_stride, int logits_stride,
                                              int groups) {
  constexpr int BYTES = DIMS * (E4M3 ? 1 : 2), PIECES = BYTES / 64, PARTS = HEADS * PIECES / 128;
  constexpr int PAGE_BYTES = PAGE * (BYTES + (E4M3 ? 4 : 0));
  __shared__ __align__(1024) u8 query[HEADS * BYTES];
  int row = blockIdx.x, first = blockIdx.y * span, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  int length = load_word(positions + row);
  // Each lane looks one page up, for the whole warp.
  int ids = load_word(table + static_cast<long long>(row) * table_stride + min(first + (ONE ? 0 : lane), table_stride - 1));
  // Never taken. What follows needs the second cache line of the arguments and must not be moved before those loads.
  hold();
  if (span < 0) return;
  uint4 part[PARTS][4];
  const u8 *from_query = queries + static_cast<long long>(row) * query_stride + threadIdx.x * 64;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) part[i][j] = load_piece(from_query + i * 128 * 64 + 16 * j);
  }
  float weight[16];
  const float *from_weights = weights + static_cast<long long>(row) * weight_stride + (lane & 3) * 2;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float2 pair = load_pair(from_weights + j * 8);
    weight[2 * j] = pair.x;
    weight[2 * j + 1] = pair.y;
  }
  hold();
  length = max(length + 1, 0) >> shift;
  int live = (length + PAGE - 1) / PAGE, parts = gridDim.y;
  if (!ONE && live <= (span - 1) * parts) {
    span = (live + parts - 1) / parts;
    first = blockIdx.y * span;
    ids = load_word(table + static_cast<long long>(row) * table_stride + min(first + lane, table_stride - 1));
  }
  if (first * PAGE >= length) return;

  int key = warp * 16 + lane / 4;
  uint4 upper[PIECES], lower[PIECES];
  float2 scale = {1.f, 1.f};
  const u8 *from_keys = pages + key * BYTES + (lane & 3) * 16;
  int to_scales = PAGE * BYTES - key * (BYTES - 4) - (lane & 3) * 16;
  auto fetch = [&](int i) {
    const u8 *from = from_keys + static_cast<long long>(ONE ? ids : __shfl_sync(FULL_WARP, ids, i)) * PAGE_BYTES;
    // One address for all, or the compiler adds each up anew.
    asm volatile("" : "+l"(from));
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      upper[p] = load_key_piece(from + 64 * p);
      lower[p] = load_key_piece(from + 64 * p + 8 * BYTES);
    }
    if (E4M3) {
      const int *scales = reinterpret_cast<const int *>(from + to_scales);
      scale = {__int_as_float(load_word(scales)), __int_as_float(load_word(scales + 8))};
    }
  };
  fetch(0);

  // Heads past the live groups are multiplied as zeros and weighed with zero: no NaN of theirs reaches a logit.
#pragma unroll
  for (int i = 0; i < 16; ++i) weight[i] = i / 2 < groups ? weight[i] : 0.f;
  int head = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
  u32 to = shared_address(query) + piece / 2 * (HEADS * 128) + head * 128 + ((piece % 2 * 4) ^ (head & 7)) * 16;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    bool live = head + i * (128 / PIECES) < groups * 8;
    auto put = [&](int column, u32 x, u32 y, u32 z, u32 w) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"((to ^ (column * 16)) + i * (128 / PIECES) * 128),
                   "r"(live ? x : 0), "r"(live ? y : 0), "r"(live ? z : 0), "r"(live ? w : 0)
                   : "memory");
    };
    const uint4(&p)[4] = part[i];
    put(0, p[0].x, p[1].x, p[2].x, p[3].x);
    put(1, p[0].y, p[1].y, p[2].y, p[3].y);
    put(2, p[0].z, p[1].z, p[2].z, p[3].z);
    put(3, p[0].w, p[1].w, p[2].w, p[3].w);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  u64 tiles = tile(shared_address(query));
  float *out = logits + static_cast<long long>(row) * logits_stride;
  int position = first * PAGE + key + (lane & 1) * 8;
  float product[32];
  auto multiply = [&]() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 2 * PIECES; ++step) {
      u64 query_tile = tiles + (step / 4) * (HEADS * 128 / 16) + (step % 4) * 2;
      const uint4 &u = upper[step / 2], &l = lower[step / 2];
      if (step % 2 == 0) multiply_held(product, u.x, l.x, u.y, l.y, query_tile, step, E4M3);
      else multiply_held(product, u.z, l.z, u.w, l.w, query_tile, step, E4M3);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" : PRODUCT_REGISTERS(product)::"memory");
  };
  auto finish = [&](float factor) {
    float2 sum = weigh<true>(product, weight, 8);
    float value = (lane & 1) ? sum.y : sum.x;
    return E4M3 ? value * factor : value;
  };
  if constexpr (ONE) {
    multiply();
    float value = finish((lane & 1) ? scale.y : scale.x);
    if ((lane & 2) == 0 && position < length) out[position] = value;
  } else {
    int count = min(span, live - first);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      multiply();
      float factor = (lane & 1) ? scale.y : scale.x;
      if (i + 1 < count) fetch(i + 1);
      asm volatile("" : PRODUCT_REGISTERS(product)::"memory");
      // Behind a condition, so that none of it is moved before those loads.
      float value = groups > 0 ? finish(factor) : 0.f;
      if ((lane & 2) == 0 && position < length) out[position] = value;
      position += PAGE;
    }
  }
}

// Arguments that the first loads need come first: they fill the first cache line of them.
#define STREAM_LOGITS(name, e4m3, one, blocks)                                                                          \
  extern "C" __global__ void __launch_bounds__(128, blocks)                                                             \
      name(const int *positions, const int *table, const u8 *queries, const u8 *pages, int table_stride,                \
           int query_stride, int shift, int span, const float *weights, float *logits, int weight_stride,               \
           int logits_stride, int groups) {                                                                             \
    stream_logits<e4m3, one>(positions, table, queries, pages, table_stride, query_stride, shift, span, weights, logits, \
                             weight_stride, logits_stride, groups);                                                     \
  }

STREAM_LOGITS(page_mqa_logits_bf16, false, true, 1)
STREAM_LOGITS(page_mqa_logits_e4m3, true, true, 1)
STREAM_LOGITS(stream_mqa_logits_bf16, false, false, 4)
STREAM_LOGITS(stream_mqa_logits_e4m3, true, false, 4)

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

#define QUERY_PITCH(bytes) ((bytes) + 16)

__device__ __forceinline__ void multiply_16x8(float *d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, bool e4m3) {
  if (!e4m3) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
#if __CUDA_ARCH__ >= 890
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
  }
}

// A warp takes 16 of a page's keys. A thread's 16-byte pieces of keys and queries hold the same dimensions in the same
// places, and a sum does not mind which order the dimensions are in, so no piece is ever rearranged.
//
// `width` > 0: the plain reader. It visits `width` positions of every row and writes negative infinity past the length.
template <bool E4M3>
__device__ __forceinline__ void direct_logits(const u8 *pages, const u8 *queries, u64 query_stride, const float *weights,
                                              int weight_stride, int groups, const int *positions, int shift,
                                              const int *table, int table_stride, float *logits, int logits_stride,
                                              int pages_a_block, int width) {
  constexpr int BYTES = DIMS * (E4M3 ? 1 : 2), PIECES = BYTES / 64;
  __shared__ __align__(16) u8 query[HEADS * QUERY_PITCH(BYTES)];
  int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  int first = blockIdx.x * pages_a_block;
  int length = max(positions[row] + 1, 0) >> shift;
  int id = table[static_cast<u64>(row) * table_stride + min(first, table_stride - 1)];
#pragma unroll
  for (int i = 0; i < HEADS * BYTES / 16 / 128; ++i) {
    int piece = i * 128 + threadIdx.x, head = piece / (BYTES / 16), at = piece % (BYTES / 16) * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(query + head * QUERY_PITCH(BYTES) + at)),
                 "l"(queries + row * query_stride + head * BYTES + at)
                 : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  float weight[16];
  load_weights(weight, weights + static_cast<u64>(row) * weight_stride, groups, lane);

  int key = warp * 16 + lane / 4;
  uint4 upper[PIECES], lower[PIECES];
  float scale[2] = {1.f, 1.f};
  constexpr u64 PAGE_BYTES = PAGE * (BYTES + (E4M3 ? 4 : 0));
  auto fetch = [&](int page) {
    const u8 *base = pages + static_cast<u64>(page) * PAGE_BYTES;
    const uint4 *from = reinterpret_cast<const uint4 *>(base + key * BYTES) + (lane & 3);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      upper[i] = __ldcs(from + 4 * i);
      lower[i] = __ldcs(from + 4 * i + 8 * BYTES / 16);
    }
    if (E4M3) {
      const float *scales = reinterpret_cast<const float *>(base + PAGE * BYTES);
      scale[0] = scales[key];
      scale[1] = scales[key + 8];
    }
  };
  if (first * PAGE < length) fetch(id);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();

#pragma unroll 1
  for (int page = first; page < first + pages_a_block; ++page) {
    float *out = logits + static_cast<u64>(row) * logits_stride + page * PAGE + key + (lane & 1) * 8;
    int position = page * PAGE + key + (lane & 1) * 8;
    if (page * PAGE >= length) {
      if (page * PAGE >= width) return;
      if ((lane & 2) == 0 && position < width) *out = -infinity();
      continue;
    }
    float product[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) product[i] = 0.f;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint4 q = *reinterpret_cast<const uint4 *>(query + (j * 8 + lane / 4) * QUERY_PITCH(BYTES) + (lane & 3) * 16 + 64 * i);
        multiply_16x8(product + 4 * j, upper[i].x, lower[i].x, upper[i].y, lower[i].y, q.x, q.y, E4M3);
        multiply_16x8(product + 4 * j, upper[i].z, lower[i].z, upper[i].w, lower[i].w, q.z, q.w, E4M3);
      }
    }
    float factor = (lane & 1) ? scale[1] : scale[0];
    if (page + 1 < first + pages_a_block && (page + 1) * PAGE < length) {
      fetch(table[static_cast<u64>(row) * table_stride + page + 1]);
    }
    float2 sum = weigh_live(product, weight, groups);
    float value = ((lane & 1) ? sum.y : sum.x) * factor;
    if ((lane & 2) == 0) {
      if (position < length) *out = value;
      else if (position < width) *out = -infinity();
    }
  }
}

#define DIRECT_LOGITS(name, e4m3)                                                                                       \
  extern "C" __global__ void __launch_bounds__(128) name(                                                               \
      const u8 *pages, const u8 *queries, u64 query_stride, const float *weights, int weight_stride, int groups,        \
      const int *positions, int shift, const int *table, int table_stride, float *logits, int logits_stride,            \
      int pages_a_block, int width) {                                                                                   \
    direct_logits<e4m3>(pages, queries, query_stride, weights, weight_stride, groups, positions, shift, table,          \
                        table_stride, logits, logits_stride, pages_a_block, width);                                     \
  }

DIRECT_LOGITS(direct_mqa_logits_bf16, false)
#if __CUDA_ARCH__ >= 890
DIRECT_LOGITS(direct_mqa_logits_e4m3, true)
#endif

#endif

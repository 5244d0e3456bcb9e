// Stores into the caches: window entries, index keys, compressed entries, and prefill. Pages out of range are skipped.

#include "common.cuh"

#define CODE 8
#define INDEX_CODE 4
#define SPAN 31
#define GATHER 29
#define RATIO 4
#define RING 8
#define PAGE_TOKENS 256
#define PAGE_ENTRIES 64
#define SWA_DIM 64
#define INDEX_DIM 128
#define ENTRY_KEY 256
#define ENTRY 384
#define PREFILL_TILE 64
#define VALUE_AT 0
#define KEY_AT 8

// Parts that a latent's ballast is folded from at most.
#define FOLDS 9

// One sliding-window entry a row: the code, then the other dims folded.
extern "C" __global__ void kv_store(Rows latent, Rows positions, Rows pages, Rows cache) {
  int position = *positions.at<int>(blockIdx.x), page = *pages.at<int>(blockIdx.x);
  const u16 *from = latent.at<u16>(blockIdx.x);
  u32 dim = threadIdx.x, folds = (latent.len / 2 - CODE) / (SWA_DIM - CODE);
  u16 parts[FOLDS];
#pragma unroll
  for (u32 i = 0; i < FOLDS; ++i) parts[i] = i < folds ? from[dim + i * (SWA_DIM - CODE)] : 0;
  if (page < 0 || page >= cache.rows || dim >= SWA_DIM) return;
  float sum = 0.f;
#pragma unroll
  for (u32 i = 0; i < FOLDS; ++i) {
    if (i < folds) sum = __fadd_rn(sum, bf16_to_float(parts[i]));
  }
  for (u32 i = FOLDS; i < folds; ++i) sum = __fadd_rn(sum, bf16_to_float(from[dim + i * (SWA_DIM - CODE)]));
  u16 *slot = cache.at<u16>(page) + (position & (PAGE_TOKENS - 1)) * SWA_DIM;
  slot[dim] = dim < CODE ? parts[0] : float_to_bf16(sum);
}

// The page that takes a row's entry: page 0 where the token completes none; -1 where there is no such page.
__device__ __forceinline__ int entry_page(int position, const Rows &table, u64 row, int &slot) {
  slot = 0;
  if (position < 0 || (position + 1) % RATIO != 0) return 0;
  int entry = position / RATIO;
  slot = entry % PAGE_ENTRIES;
  u64 word = entry / PAGE_ENTRIES;
  return (word + 1) * 4 <= table.len ? table.at<int>(row)[word] : -1;
}

// Writes an index key of `code(dim)`; one warp.
template <class Code>
__device__ __forceinline__ void put_key(const Rows &cache, int page, int slot, bool e4m3, Code code) {
  u32 lane = threadIdx.x & 31;
  float value[4], largest = 0.f;
  for (u32 i = 0; i < 4; ++i) {
    u32 dim = lane * 4 + i;
    value[i] = dim < SPAN * INDEX_CODE ? code(dim) : dim < SPAN * INDEX_CODE + 3 ? 1.f : 0.f;
    largest = fmaxf(largest, fabsf(value[i]));
  }
  u32 at = slot * INDEX_DIM + lane * 4;
  if (!e4m3) {
    *reinterpret_cast<uint2 *>(cache.at<u16>(page) + at) =
        make_uint2(pack_bf16(value[0], value[1]), pack_bf16(value[2], value[3]));
    return;
  }
  float scale = quantisation_scale(warp_max(largest));
  u32 low = pack_e4m3(__fdiv_rn(value[0], scale), __fdiv_rn(value[1], scale));
  u32 high = pack_e4m3(__fdiv_rn(value[2], scale), __fdiv_rn(value[3], scale));
  *reinterpret_cast<u32 *>(cache.at<u8>(page) + at) = low | high << 16;
  if (lane == 0) cache.at<float>(page)[PAGE_ENTRIES * INDEX_DIM / 4 + slot] = scale;
}

// Writes a compressed entry: `code(dim)` of its key, `value(dim)` of its four tokens; `threads` threads, of which this is
// number `thread`.
template <class Code, class Value>
__device__ __forceinline__ void put_entry(const Rows &cache, int page, int slot, u32 entry, u32 thread, u32 threads, Code code,
                                          Value value) {
  u8 *key = cache.at<u8>(page) + slot * ENTRY;
  for (u32 pair = thread; pair < ENTRY_KEY / 2; pair += threads) {
    u32 dim = pair * 2;
    reinterpret_cast<u16 *>(key)[pair] = dim < SPAN * CODE ? pack_e4m3(code(dim), code(dim + 1)) : 0;
  }
  u16 *rest = reinterpret_cast<u16 *>(key + ENTRY_KEY);
  for (u32 dim = thread; dim < (ENTRY - ENTRY_KEY) / 2; dim += threads) {
    u32 tail = dim - RATIO * CODE;
    float word = dim < RATIO * CODE ? value(dim)
                 : tail == 0        ? static_cast<float>(entry >> 8)
                 : tail == 1        ? static_cast<float>(entry & 0xff)
                 : tail < 4         ? 1.f
                                    : 0.f;
    rest[dim] = float_to_bf16(word);
  }
}

// Where the four tokens that end at `position` have their ring slots, and where their entry goes.
struct Closing {
  const u8 *ring;
  u32 slot_bytes;
  int position, page, slot;
  bool valid;

  // The ring slot of the token `back` before the last.
  __device__ __forceinline__ const float *token(int back) const {
    return reinterpret_cast<const float *>(ring + ((position - back) & (RING - 1)) * slot_bytes);
  }

  // Dim `dim` of a key whose tokens have `code` dims each: the last token but one first, then older ones. The third and
  // all before it are in one slot.
  __device__ __forceinline__ float key(u32 dim, u32 code) const {
    u32 back = min(dim / code, 2u);
    return token(back + 1)[dim - back * code];
  }
};

__device__ __forceinline__ Closing closing(const Rows &ring, const Rows &positions, const Rows &pages, const Rows &table,
                                           const Rows &cache, u64 row) {
  Closing c;
  c.position = *positions.at<int>(row);
  int ring_page = *pages.at<int>(row);
  c.ring = ring.at<u8>(ring_page);
  c.slot_bytes = ring.len / RING;
  c.page = entry_page(c.position, table, row, c.slot);
  c.valid = ring_page >= 0 && ring_page < ring.rows && c.page >= 0 && c.page < cache.rows;
  return c;
}

extern "C" __global__ void index_store(Rows ring, Rows positions, Rows pages, Rows table, Rows cache, u32 e4m3) {
  Closing c = closing(ring, positions, pages, table, cache, blockIdx.x);
  if (!c.valid) return;
  put_key(cache, c.page, c.slot, e4m3, [&](u32 dim) { return c.key(dim, INDEX_CODE); });
}

extern "C" __global__ void core_store(Rows ring, Rows positions, Rows pages, Rows table, Rows cache) {
  Closing c = closing(ring, positions, pages, table, cache, blockIdx.x);
  if (!c.valid) return;
  put_entry(
      cache, c.page, c.slot, max(c.position, 0) / RATIO, threadIdx.x, blockDim.x, [&](u32 dim) { return c.key(dim, CODE); },
      [&](u32 dim) { return c.token(RATIO - 1 - dim / CODE)[GATHER * CODE + dim % CODE]; });
}

// What decoding the tokens one by one would leave in a layer's caches: a block a tile of tokens, a warp a token.
struct Chunk {
  const float *codes;
  const u32 *tokens;
  int start, count;
  // Code `dim` of the token at `position`; zero outside the chunk.
  __device__ __forceinline__ float code(int position, u32 dim) const {
    int at = position - start;
    return at >= 0 && at < count ? codes[min(tokens[at], 255u) * 16 + dim] : 0.f;
  }
};

extern "C" __global__ void prefill(Rows tokens, Rows table, Rows window, Rows index_ring, Rows index_keys, Rows core_ring,
                                   Rows entries, Weight embedding, int start, int window_from, int entries_from, int ring_page,
                                   int format) {
  extern __shared__ float codes[];
  for (u32 i = threadIdx.x; i < 256 * 16; i += blockDim.x) codes[i] = 0.f;
  __syncthreads();
  for (u32 token = threadIdx.x; token < 256; token += blockDim.x) {
    for (u32 i = embedding.start[token]; i < embedding.start[token + 1] && embedding.column[i] < 16; ++i) {
      codes[token * 16 + embedding.column[i]] = embedding.value[i];
    }
  }
  __syncthreads();
  Chunk chunk = {codes, tokens.at<u32>(0), start, static_cast<int>(tokens.len / 4)};
  u32 lane = threadIdx.x & 31;
  int end = start + chunk.count, first = start + blockIdx.x * PREFILL_TILE;
  for (int position = first + threadIdx.x / 32; position < min(first + PREFILL_TILE, end); position += blockDim.x / 32) {
    bool ring_valid = ring_page >= 0;
    if (ring_valid && ring_page < window.rows && position >= window_from && position + PAGE_TOKENS >= end) {
      u16 *slot = window.at<u16>(ring_page) + (position & (PAGE_TOKENS - 1)) * SWA_DIM;
      for (u32 dim = lane; dim < SWA_DIM; dim += 32) {
        slot[dim] = dim < CODE ? float_to_bf16(chunk.code(position, KEY_AT + dim)) : 0;
      }
    }
    if (format < 0) continue;
    if (ring_valid && position >= window_from && position + RING >= end) {
      if (ring_page < index_ring.rows) {
        u32 width = index_ring.len / RING / 4;
        float *slot = index_ring.at<float>(ring_page) + (position & (RING - 1)) * width;
        for (u32 dim = lane; dim < width; dim += 32) {
          slot[dim] = dim < GATHER * INDEX_CODE ? chunk.code(position - dim / INDEX_CODE, KEY_AT + dim % INDEX_CODE) : 0.f;
        }
      }
      if (ring_page < core_ring.rows) {
        u32 width = core_ring.len / RING / 4;
        float *slot = core_ring.at<float>(ring_page) + (position & (RING - 1)) * width;
        for (u32 dim = lane; dim < width; dim += 32) {
          u32 tail = dim - GATHER * CODE;
          slot[dim] = dim < GATHER * CODE ? chunk.code(position - dim / CODE, KEY_AT + dim % CODE)
                      : tail < CODE       ? chunk.code(position, VALUE_AT + tail)
                                          : 0.f;
        }
      }
    }
    if (position < entries_from || (position + 1) % RATIO != 0) continue;
    int slot, page = entry_page(position, table, 0, slot);
    if (page >= 0 && page < index_keys.rows) {
      put_key(index_keys, page, slot, format == 1,
              [&](u32 dim) { return chunk.code(position - 1 - dim / INDEX_CODE, KEY_AT + dim % INDEX_CODE); });
    }
    if (page >= 0 && page < entries.rows) {
      put_entry(
          entries, page, slot, position / RATIO, lane, 32,
          [&](u32 dim) { return chunk.code(position - 1 - dim / CODE, KEY_AT + dim % CODE); },
          [&](u32 dim) { return chunk.code(position - (RATIO - 1 - dim / CODE), VALUE_AT + dim % CODE); });
    }
  }
}

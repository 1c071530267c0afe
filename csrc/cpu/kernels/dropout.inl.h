// Dropout without a stored mask: whether query i of (b, h) keeps key j is a pure function of (seed, b, h, i, j), so
// backward, any tile size and any number of threads find the same mask. `splitmix64` is Steele, Lea & Flood's (2014);
// the 32-bit rounds follow the multiply-xorshift form of Wellons' "hash prospector".
#pragma once

#include "params.h"
#include "simd.inl.h"

namespace mha_ext::kernels {
namespace {

MHA_EXT_INLINE uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

MHA_EXT_INLINE uint64_t dropout_key(const AttentionParams& p, int64_t batch, int64_t head) {
  const auto seed = static_cast<uint64_t>(p.seeds[batch / p.seed_samples]);
  return splitmix64(splitmix64(seed) ^ static_cast<uint64_t>(batch % p.seed_samples * p.heads + head));
}

// What a key brings to the hash of its pairs.
struct DropoutBits {
  uint32_t first, second;
  DropoutBits(uint64_t key, int64_t key_index) {
    const uint64_t bits = splitmix64(key + static_cast<uint64_t>(key_index));
    first = static_cast<uint32_t>(bits);
    second = static_cast<uint32_t>(bits >> 32);
  }
};

// Lanes set where pairs of a query and a key are kept.
template <class V>
MHA_EXT_INLINE typename V::IntVec kept_pairs(typename V::HashVec query, typename V::HashVec first,
                                             typename V::HashVec second, uint32_t drop_below) {
  typename V::HashVec x = query ^ first;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) + second;
  x = x * 0x846ca68bu;
  x = x ^ (x >> 16);
  x = x * 0x9E3779B1u;
  x = x ^ (x >> 15);
  return V::lane_mask(reinterpret_cast<typename V::HashVec>(x >= drop_below));
}

template <class V>
struct DropoutRow {  // one key against many queries
  DropoutBits bits;
  DropoutRow(uint64_t key, int64_t key_index) : bits(key, key_index) {}

  // Lanes set where queries query_index ... keep the key.
  MHA_EXT_INLINE typename V::IntVec keep(int64_t query_index, uint32_t drop_below) const {
    typename V::HashVec query;
    for (int i = 0; i < V::kWidth; ++i) query[i] = static_cast<uint32_t>(i);
    return kept_pairs<V>(query + static_cast<uint32_t>(query_index), typename V::HashVec{} + bits.first,
                         typename V::HashVec{} + bits.second, drop_below);
  }
};

}  // namespace
}  // namespace mha_ext::kernels

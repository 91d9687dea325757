// Limits of a vocabulary, and of names, beyond which llama.cpp takes more time or memory than the bytes of the file
// justify (FORMAT.md section 4). No ggml.
#pragma once

#include "gguf/header.h"

#include <cstdint>
#include <string>
#include <vector>

namespace macko {

constexpr size_t  MAX_TOKEN_NBYTES    = 4096;
constexpr size_t  MAX_MERGE_NBYTES    = 2 * MAX_TOKEN_NBYTES + 1;
constexpr int64_t MAX_TOKENS_SQUARED  = int64_t(1) << 28; // sum of the squares of the lengths
constexpr int64_t MAX_SPECIAL_TOKENS  = 65536;
constexpr int64_t MAX_BUCKET_WORK     = 64; // comparisons per item of a hash table, on average
constexpr int64_t BUCKET_WORK_IGNORED = int64_t(1) << 22;

// Lengths, and how the tokens spread over a hash table.
[[nodiscard]] int check_token_limits(const std::vector<std::string> & tokens);
[[nodiscard]] int check_merge_limits(const std::vector<std::string> & merges);
// how the names of keys and tensors spread over a hash table
[[nodiscard]] int check_name_limits(const gguf_header & header);
// whether strings spread over the buckets of a std::unordered_map, at all sizes that it has while it is filled
bool spreads_over_buckets(const std::vector<size_t> & hashes);

} // namespace macko

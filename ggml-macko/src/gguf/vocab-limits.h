// Limits of vocabularies and names. Beyond them, llama.cpp needs more time or memory than the bytes of the file justify
// (SECURITY.md). Does not use ggml.
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

// Check the lengths of tokens or merges, and their distribution in a hash table.
[[nodiscard]] int check_token_limits(const std::vector<std::string> & tokens);
[[nodiscard]] int check_merge_limits(const std::vector<std::string> & merges);
// Checks the distribution of key and tensor names in a hash table.
[[nodiscard]] int check_name_limits(const gguf_header & header);
// Whether strings are distributed well over the buckets of a std::unordered_map, at every size that it has while it
// grows.
bool spreads_over_buckets(const std::vector<size_t> & hashes);

} // namespace macko

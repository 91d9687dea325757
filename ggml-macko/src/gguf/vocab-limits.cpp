#include "gguf/vocab-limits.h"
#include "codec/status.h"

#include <algorithm>
#include <cinttypes>
#include <functional>
#include <unordered_set>

namespace macko {

bool spreads_over_buckets(const std::vector<size_t> & hashes) {
    std::vector<uint32_t> items;
    // an empty table grows like llama.cpp's tables: both use the same standard library
    std::unordered_set<int> table;
    for (size_t n_buckets = table.bucket_count();; n_buckets = table.bucket_count()) {
        const size_t n = std::min(hashes.size(), n_buckets); // a table has no more items than buckets
        items.assign(n_buckets, 0);
        int64_t comparisons = 0;
        for (size_t i = 0; i < n; i++) {
            comparisons += items[hashes[i] % n_buckets]++;
        }
        if (comparisons > static_cast<int64_t>(n) * MAX_BUCKET_WORK + BUCKET_WORK_IGNORED) {
            return false;
        }
        if (n_buckets >= hashes.size()) {
            return true;
        }
        table.rehash(n_buckets == 1 ? 2 : 2 * n_buckets + 1); // libc++ starts with 0 buckets and uses primes above 2
    }
}

static int check_hashes(const char * what, const std::vector<size_t> & hashes) {
    return spreads_over_buckets(hashes)
               ? GGML_MACKO_STATUS_OK
               : fail(GGML_MACKO_STATUS_LIMIT, "%s: too many strings with equal hash values (of %zu)", what,
                      hashes.size());
}

int check_name_limits(const gguf_header & header) {
    std::vector<size_t> keys, tensors;
    for (const gguf_key & key : header.keys) {
        keys.push_back(std::hash<std::string>{}(key.name));
    }
    for (const gguf_tensor & tensor : header.tensors) {
        tensors.push_back(std::hash<std::string>{}(tensor.name));
    }
    const int status = check_hashes("names of keys", keys);
    return status ? status : check_hashes("names of tensors", tensors);
}

static int check_length(const char * key, size_t i, const std::string & text, size_t limit) {
    return text.size() <= limit ? GGML_MACKO_STATUS_OK
                                : fail(GGML_MACKO_STATUS_LIMIT, "key %s: string %zu is too long (%zu vs %zu bytes)",
                                       key, i, text.size(), limit);
}

// For each character of a BPE token that represents no byte, llama.cpp writes the whole token: the cost is the length
// squared.
int check_token_limits(const std::vector<std::string> & tokens) {
    constexpr char      key[]   = "tokenizer.ggml.tokens";
    int64_t             squared = 0;
    std::vector<size_t> hashes;
    hashes.reserve(tokens.size());
    for (size_t i = 0; i < tokens.size(); i++) {
        TRY(check_length(key, i, tokens[i], MAX_TOKEN_NBYTES));
        squared += static_cast<int64_t>(tokens[i].size() * tokens[i].size());
        const std::string text = tokens[i].c_str(); // llama.cpp cuts a token at its first NUL, and names empty ones
        hashes.push_back(std::hash<std::string>{}(text.empty() ? "[EMPTY_" + std::to_string(i) + "]" : text));
    }
    if (squared > MAX_TOKENS_SQUARED) {
        return fail(GGML_MACKO_STATUS_LIMIT,
                    "key %s: too many long tokens (sum of squared lengths %" PRId64 " vs %" PRId64 ")", key, squared,
                    MAX_TOKENS_SQUARED);
    }
    return check_hashes("tokenizer.ggml.tokens", hashes);
}

int check_merge_limits(const std::vector<std::string> & merges) {
    constexpr char      key[] = "tokenizer.ggml.merges";
    std::vector<size_t> hashes;
    hashes.reserve(merges.size());
    for (size_t i = 0; i < merges.size(); i++) {
        TRY(check_length(key, i, merges[i], MAX_MERGE_NBYTES));
        // the two halves and their hash, as in llama.cpp's table of ranks
        const std::string word  = merges[i].c_str();
        const size_t      space = word.find(' ', 1);
        if (space != std::string::npos) { // all merges without a space are one item
            hashes.push_back(std::hash<std::string>{}(word.substr(0, space)) ^
                             (std::hash<std::string>{}(word.substr(space + 1)) << 1));
        }
    }
    return check_hashes("tokenizer.ggml.merges", hashes);
}

} // namespace macko

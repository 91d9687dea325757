// GGUF files as inputs: small ones to begin with, and mutations that keep lengths and offsets consistent, so that what
// lies behind the first check is reached, too.
#pragma once

#include "fuzz.h"

namespace fuzz {

// Small sparse models: each format, storage type and index once, alone in a file, and one with many.
std::vector<builder::file> small_sparse_files();
// Small dense models that shrink when they are compressed on load.
std::vector<builder::file> small_dense_files();
// whole models with vocabularies, without and with thresholds of neurons, for the checks of keys
std::vector<builder::file> whole_models();
// like llama-gguf-split: the metadata is in the first part, and the tensors are distributed in order
std::vector<builder::file> split(const builder::file & f, size_t n);

// A file from bytes, as far as they can be read; nullopt-like false if there are no keys or no tensors in them. With
// stored = false the bytes end behind the tensor table, and the sizes of the tensors become holes.
bool parse(const uint8_t * data, size_t size, bool stored, uint64_t file_size, builder::file * f);

// Changes one to three keys, tensors or, if they are stored, bytes of payload.
void mutate_file(rng & r, bool stored, builder::file * f);
// the mutator of targets whose input is a GGUF file
size_t mutate_gguf(uint8_t * data, size_t size, size_t max_size, uint64_t seed);

} // namespace fuzz

// GGUF files as inputs: small seeds, and mutations that keep lengths and offsets consistent, so that code after the
// first check is also reached.
#pragma once

#include "fuzz.h"

namespace fuzz {

// Small sparse models: one file for each format, storage type and index, and one file with many matrices.
std::vector<builder::file> small_sparse_files();
// Small dense models that shrink when they are compressed on load.
std::vector<builder::file> small_dense_files();
// whole models with vocabularies, without and with thresholds of neurons, for the checks of keys
std::vector<builder::file> whole_models();
// like llama-gguf-split: the metadata is in the first part, and the tensors are distributed in order
std::vector<builder::file> split(const builder::file & f, size_t n);

// Parses a file from bytes, as far as they can be read. Returns false if they contain no keys or no tensors. With
// stored = false, the bytes end after the tensor table, and the sizes of the tensors become holes.
bool parse(const uint8_t * data, size_t size, bool stored, uint64_t file_size, builder::file * f);

// Changes one to three keys, tensors or, if they are stored, bytes of payload.
void mutate_file(rng & r, bool stored, builder::file * f);
// the mutator of targets whose input is a GGUF file
size_t mutate_gguf(uint8_t * data, size_t size, size_t max_size, uint64_t seed);

} // namespace fuzz

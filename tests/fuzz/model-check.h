// Properties of every model file that the library accepts: its matrices decode to the elements that a slow decoder
// finds, and the dense file that it represents has the right header.
#pragma once

#include "fuzz.h"
#include "load/model-file.h"

namespace fuzz {

// Runs the header checks of a load that precede the payload; source need not contain the data of tensors.
int vet_header(const macko::byte_source & source, macko::model_file * file);
// Reads the header of the dense file that an accepted file represents.
void check_dense_header(const macko::model_file & file);
// Reads the payload of matrix m, whose file has passed vet_header. If it is accepted, compares its elements with those
// of a slow decoder, and its bytes with those of a slow encoder. Returns true if it is accepted.
bool check_matrix(const macko::byte_source & source, const macko::model_file & file,
                  const macko::sparse_tensor_info & m);
// The elements of an accepted matrix, as read_payload passes them to a device.
bytes read_dense(const macko::byte_source & source, const macko::model_file & file,
                 const macko::sparse_tensor_info & m);

} // namespace fuzz

// What must hold for a model file that the library accepts: its matrices decode to what a slow decoder finds in the
// bytes, and the dense file that it stands for has the right header.
#pragma once

#include "fuzz.h"
#include "load/model-file.h"

namespace fuzz {

// the checks on a header that a load makes before it reads any payload; source need not hold the data of tensors
int vet_header(const macko::byte_source & source, macko::model_file * file);
// reads the header of the dense file that an accepted file stands for
void check_dense_header(const macko::model_file & file);
// Reads the payload of matrix m, whose file has passed vet_header. If it is accepted, its elements are compared with
// those that a slow decoder finds, and with the bytes that a slow encoder makes of them. True if it is accepted.
bool check_matrix(const macko::byte_source & source, const macko::model_file & file,
                  const macko::sparse_tensor_info & m);
// the elements of an accepted matrix, as read_payload hands them to a device
bytes read_dense(const macko::byte_source & source, const macko::model_file & file,
                 const macko::sparse_tensor_info & m);

} // namespace fuzz

// Which inputs of a model's weights may count as zero, because its keys macko.act.* say so (FORMAT.md section 9).
#pragma once

#include "load/model-file.h"

namespace macko {

// Gives the sparse matrices that the keys name their thresholds. *none: nullptr, or why no matrix has got one.
// BAD_KEY_VALUE if a name is not that of a matrix of the model.
[[nodiscard]] int set_thresholds(model_file * file, const char ** none);

} // namespace macko

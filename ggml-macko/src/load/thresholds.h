// Input thresholds of a model's weights, from its keys macko.act.* (FORMAT.md section 10).
#pragma once

#include "load/model-file.h"

namespace macko {

// Assigns thresholds to the sparse matrices that the keys name. *none: nullptr, or the reason why no matrix has a
// threshold. BAD_KEY_VALUE if a name is not a matrix of the model.
[[nodiscard]] int set_thresholds(model_file * file, const char ** none);

} // namespace macko

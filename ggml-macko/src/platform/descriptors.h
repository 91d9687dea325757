// The files that this process has open, from Linux's /proc.
#pragma once

#include <string>
#include <vector>

namespace macko::platform {

// The descriptors that this process has open; none where the system does not list them.
std::vector<int> open_descriptors();
// A path that opens the file of a descriptor again, even if the file has no name any more.
std::string path_of_descriptor(int fd);
// The absolute path of the file of a descriptor; "" if unknown.
std::string name_of_descriptor(int fd);

} // namespace macko::platform

#include "platform/descriptors.h"

#include <climits>
#include <cstdlib>
#include <dirent.h>
#include <unistd.h>

namespace macko::platform {

static constexpr char FOLDER[] = "/proc/self/fd/";

std::vector<int> open_descriptors() {
    std::vector<int> all;
    if (DIR * folder = opendir(FOLDER)) {
        while (const dirent * entry = readdir(folder)) {
            char *     end = nullptr;
            const long fd  = strtol(entry->d_name, &end, 10);
            if (*end == 0 && fd != dirfd(folder)) { // not "." and ".."
                all.push_back(static_cast<int>(fd));
            }
        }
        closedir(folder);
    }
    return all;
}

std::string path_of_descriptor(int fd) { return FOLDER + std::to_string(fd); }

std::string name_of_descriptor(int fd) {
    std::string   name(PATH_MAX, 0);
    const ssize_t n = readlink(path_of_descriptor(fd).c_str(), name.data(), name.size());
    name.resize(n < 0 ? 0 : static_cast<size_t>(n));
    return name;
}

} // namespace macko::platform

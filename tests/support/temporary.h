// Folders that exist for one test.
#pragma once

#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

struct temporary_folder {
    std::string path;

    explicit temporary_folder(const std::string & name) {
        const std::string number = std::to_string(std::random_device{}());
        path                     = (std::filesystem::temp_directory_path() / (name + "-" + number)).string();
        std::filesystem::create_directory(path);
    }
    temporary_folder(const temporary_folder &) = delete;
    ~temporary_folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
};

inline void write_file(const std::string & path, const std::vector<uint8_t> & content) {
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char *>(content.data()), static_cast<std::streamsize>(content.size()));
}

// The functions of platform.h and files.h that the core needs, for Windows. Only Wine has run them.
#define _CRT_RAND_S // rand_s in stdlib.h
#include "platform/files.h"
#include "platform/platform.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <windows.h>

namespace macko::platform {

bool random_bytes(void * out, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned number = 0;
        if (rand_s(&number)) {
            return false;
        }
        static_cast<uint8_t *>(out)[i] = static_cast<uint8_t>(number);
    }
    return true;
}

char ** environment_entries() { return _environ; }

int64_t process_id() { return GetCurrentProcessId(); }

thread_pointer::thread_pointer() : key_(TlsAlloc()), exists_(key_ != TLS_OUT_OF_INDEXES) {}

void * thread_pointer::get() const { return exists_ ? TlsGetValue(static_cast<DWORD>(key_)) : nullptr; }

void thread_pointer::set(void * value) const {
    if (exists_) {
        TlsSetValue(static_cast<DWORD>(key_), value);
    }
}

FILE * open_stream(void *, const stream_functions &) {
    errno = ENOSYS;
    return nullptr;
}

// ---- files ----

static HANDLE handle_of(const file & f) { return reinterpret_cast<HANDLE>(f.handle()); }

file::~file() {
    if (handle_ != NONE) { // INVALID_HANDLE_VALUE has the same bits
        CloseHandle(handle_of(*this));
    }
}

static void set_errno() {
    switch (GetLastError()) {
        case ERROR_FILE_NOT_FOUND:
        case ERROR_PATH_NOT_FOUND:
        case ERROR_INVALID_NAME:        errno = ENOENT; break;
        case ERROR_ACCESS_DENIED:
        case ERROR_SHARING_VIOLATION:   errno = EACCES; break;
        case ERROR_TOO_MANY_OPEN_FILES: errno = EMFILE; break;
        default:                        errno = EIO;
    }
}

// of 100 nanoseconds since 1601
static file_time time_of(int64_t ticks) {
    constexpr int64_t PER_SECOND = 10'000'000, UNTIL_1970 = 11'644'473'600;
    return { ticks / PER_SECOND - UNTIL_1970, ticks % PER_SECOND * 100 };
}

static int64_t joined(DWORD high, DWORD low) { return static_cast<int64_t>(uint64_t(high) << 32 | low); }

bool get_status(const file & f, file_status * status) {
    BY_HANDLE_FILE_INFORMATION found = {};
    FILE_BASIC_INFO            times = {};
    *status                          = {};
    if (GetFileType(handle_of(f)) != FILE_TYPE_DISK) {
        return true; // a device or a pipe
    }
    if (!GetFileInformationByHandle(handle_of(f), &found) ||
        !GetFileInformationByHandleEx(handle_of(f), FileBasicInfo, &times, sizeof(times))) {
        set_errno();
        return false;
    }
    status->device     = found.dwVolumeSerialNumber;
    status->inode      = static_cast<uint64_t>(joined(found.nFileIndexHigh, found.nFileIndexLow));
    status->size       = joined(found.nFileSizeHigh, found.nFileSizeLow);
    status->written    = time_of(times.LastWriteTime.QuadPart);
    status->changed    = time_of(times.ChangeTime.QuadPart);
    status->is_regular = !(found.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY);
    return true;
}

file open_file(const char * path, file_status * status) {
    std::wstring wide(static_cast<size_t>(MultiByteToWideChar(CP_UTF8, 0, path, -1, nullptr, 0)), 0);
    MultiByteToWideChar(CP_UTF8, 0, path, -1, wide.data(), static_cast<int>(wide.size()));
    // FILE_FLAG_BACKUP_SEMANTICS opens folders, too, whose status then tells what they are
    file f(reinterpret_cast<intptr_t>(CreateFileW(wide.c_str(), GENERIC_READ,
                                                  FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr,
                                                  OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, nullptr)));
    if (!f) {
        set_errno();
        return file();
    }
    return get_status(f, status) ? std::move(f) : file();
}

int64_t read_file(const file & f, void * to, size_t n, int64_t offset) {
    constexpr size_t AT_ONCE = size_t(1) << 30;
    size_t           done    = 0;
    while (done < n) {
        const auto at       = static_cast<uint64_t>(offset) + done;
        OVERLAPPED position = {};
        position.Offset     = static_cast<DWORD>(at);
        position.OffsetHigh = static_cast<DWORD>(at >> 32);
        DWORD      got      = 0;
        const auto wanted   = static_cast<DWORD>(std::min(n - done, AT_ONCE));
        if (!ReadFile(handle_of(f), static_cast<uint8_t *>(to) + done, wanted, &got, &position)) {
            if (GetLastError() == ERROR_HANDLE_EOF) {
                break;
            }
            set_errno();
            return -1;
        }
        if (got == 0) {
            break;
        }
        done += got;
    }
    return static_cast<int64_t>(done);
}

} // namespace macko::platform

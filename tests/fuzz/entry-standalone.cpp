// A target without libFuzzer: runs stored inputs, then mutants of them and of the target's seeds for some seconds. It
// does not measure coverage, but builds with any compiler, and limits memory and time of each input.
//
//     fuzz-header [--seconds=5] [--seed=N] [FILE or FOLDER ...]
//
// Prints its seed, the number of inputs, and the number of accepted ones. Fails if almost all or almost none were
// accepted, because then the target tests little. The current input is in the file fuzz-NAME.input, which remains if
// the process dies.
#include "fuzz.h"

#include <atomic>
#include <chrono>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <malloc.h>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

using namespace fuzz;

// ---- memory: counts the bytes of every operator new of the process ----

static std::atomic<int64_t> mem_live{ 0 };
static std::atomic<int64_t> mem_peak{ 0 };

static void * counted_alloc(size_t n) {
    void * p = malloc(n);
    if (p == nullptr) {
        return nullptr;
    }
    const int64_t live = mem_live += static_cast<int64_t>(malloc_usable_size(p));
    int64_t       peak = mem_peak;
    while (live > peak && !mem_peak.compare_exchange_weak(peak, live)) {
    }
    return p;
}
static void counted_free(void * p) {
    if (p != nullptr) {
        mem_live -= static_cast<int64_t>(malloc_usable_size(p));
        free(p);
    }
}
static void * counted_or_throw(size_t n) {
    void * p = counted_alloc(n);
    if (p == nullptr) {
        throw std::bad_alloc();
    }
    return p;
}
void * operator new(size_t n) { return counted_or_throw(n); }
void * operator new[](size_t n) { return counted_or_throw(n); }
void * operator new(size_t n, const std::nothrow_t &) noexcept { return counted_alloc(n); }
void * operator new[](size_t n, const std::nothrow_t &) noexcept { return counted_alloc(n); }
void   operator delete(void * p) noexcept { counted_free(p); }
void   operator delete[](void * p) noexcept { counted_free(p); }
void   operator delete(void * p, size_t) noexcept { counted_free(p); }
void   operator delete[](void * p, size_t) noexcept { counted_free(p); }

constexpr int64_t MEM_PER_BYTE = 64; // dense bytes that an accepted file may represent, per byte

// ---- mutations without regard to the structure of the input ----

static rng random_source(0);

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t max_size) {
    rng & r = random_source;
    if (max_size == 0) {
        return 0;
    }
    if (size == 0) {
        data[0] = static_cast<uint8_t>(r.bits());
        return 1;
    }
    const size_t at = r.pick(size), n = std::min(size - at, 1 + r.pick(r.one_in(4) ? 64 : 8));
    switch (r.below(8)) {
        case 0: data[at] ^= static_cast<uint8_t>(1 << r.below(8)); return size;
        case 1: data[at] = static_cast<uint8_t>(r.bits()); return size;
        case 2: data[at] = static_cast<uint8_t>(data[at] + (r.one_in(2) ? 1 : -1)); return size;
        case 3: memmove(data + at, data + at + n, size - at - n); return size - n;
        case 4: { // n additional bytes
            const size_t more = std::min(n, max_size - size);
            memmove(data + at + more, data + at, size - at);
            return size + more;
        }
        case 5: { // copy one region over another
            const size_t to = r.pick(size);
            memmove(data + to, data + at, std::min(n, size - to));
            return size;
        }
        case 6: { // a 4-byte number that is often a limit
            static constexpr uint32_t NUMBERS[] = { 0, 1, 0x7f, 0xff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff };
            const uint32_t            v         = NUMBERS[r.pick(std::size(NUMBERS))];
            memcpy(data + at, &v, std::min<size_t>(size - at, 4));
            return size;
        }
        default: return r.one_in(4) ? at : size; // truncate
    }
}

static bytes mutant_of(const std::vector<bytes> & pool) {
    rng &        r = random_source;
    bytes        b = pool[r.pick(pool.size())];
    const size_t n = b.size();
    b.resize(TARGET.max_nbytes);
    size_t size = std::min(n, b.size());
    for (uint64_t i = 1 + r.below(3); i > 0; i--) {
        size = TARGET.mutate ? TARGET.mutate(b.data(), size, b.size(), r.bits())
                             : LLVMFuzzerMutate(b.data(), size, b.size());
    }
    b.resize(size);
    return b;
}

// ---- runs ----

struct runner {
    uint8_t *   shown = nullptr; // the file with the current input
    std::string path  = std::string("fuzz-") + TARGET.name + ".input";
    int64_t     n_run = 0, n_accepted = 0, mem_worst = 0;
    double      slowest = 0;

    runner() {
        const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0644);
        FUZZ_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(TARGET.max_nbytes)) == 0, "cannot write %s",
                   path.c_str());
        shown = static_cast<uint8_t *>(mmap(nullptr, TARGET.max_nbytes, PROT_WRITE, MAP_SHARED, fd, 0));
        FUZZ_CHECK(shown != MAP_FAILED, "mmap");
        close(fd);
    }
    ~runner() {
        munmap(shown, TARGET.max_nbytes);
        unlink(path.c_str());
    }
    void run(const bytes & b) {
        memcpy(shown, b.data(), b.size());
        memset(shown + b.size(), 0, TARGET.max_nbytes - b.size());
        const int64_t live   = mem_live;
        mem_peak             = live;
        const clock_t before = clock(); // CPU time, so that a busy machine is not mistaken for an endless loop
        n_accepted += TARGET.run(b.data(), b.size()) ? 1 : 0;
        const double  seconds = static_cast<double>(clock() - before) / CLOCKS_PER_SEC;
        const int64_t used    = mem_peak - live;
        n_run++;
        mem_worst = std::max(mem_worst, used);
        slowest   = std::max(slowest, seconds);
        FUZZ_CHECK(used < MEM_PER_BYTE * static_cast<int64_t>(b.size()) + TARGET.max_memory,
                   "%lld bytes of memory for an input of %zu", static_cast<long long>(used), b.size());
        FUZZ_CHECK(seconds < TARGET.max_seconds, "%.1f s for an input of %zu bytes", seconds, b.size());
    }
};

static void add_stored(const std::string & path, std::vector<bytes> * pool) {
    namespace fs = std::filesystem;
    std::vector<fs::path> files;
    if (fs::is_directory(path)) {
        for (const auto & entry : fs::directory_iterator(path)) {
            files.push_back(entry.path());
        }
        std::sort(files.begin(), files.end());
    } else {
        files.emplace_back(path);
    }
    for (const fs::path & file : files) {
        std::ifstream in(file, std::ios::binary);
        FUZZ_CHECK(in, "cannot read %s", file.c_str());
        pool->emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
        FUZZ_CHECK(pool->back().size() <= TARGET.max_nbytes, "%s: an input has at most %zu bytes", file.c_str(),
                   TARGET.max_nbytes);
    }
}

int main(int argc, char ** argv) {
    double             seconds = 5;
    uint64_t           seed    = static_cast<uint64_t>(time(nullptr) / 86400);
    std::vector<bytes> pool    = TARGET.seeds();
    for (const bytes & b : pool) {
        FUZZ_CHECK(b.size() <= TARGET.max_nbytes && TARGET.run(b.data(), b.size()), "seed %zd of %zu bytes: %s",
                   &b - pool.data(), b.size(), ggml_macko_last_error());
    }
    for (int i = 1; i < argc; i++) {
        if (sscanf(argv[i], "--seconds=%lf", &seconds) != 1 && sscanf(argv[i], "--seed=%lu", &seed) != 1) {
            add_stored(argv[i], &pool);
        }
    }
    printf("fuzz-%s: seed %lu, %zu stored inputs\n", TARGET.name, seed, pool.size());
    fflush(stdout);
    random_source = rng(seed);
    runner     r;
    const auto start   = std::chrono::steady_clock::now();
    const auto elapsed = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    for (const bytes & b : pool) {
        r.run(b);
    }
    const int64_t n_stored = r.n_run, accepted_stored = r.n_accepted;
    while (elapsed() < seconds) {
        r.run(mutant_of(pool));
    }
    const int64_t n = r.n_run - n_stored;
    const double  accepted =
        static_cast<double>(r.n_accepted - accepted_stored) / static_cast<double>(std::max<int64_t>(n, 1));
    printf("fuzz-%s: %lld stored inputs, %lld accepted; %lld mutants, %.0f/s, %.1f %% accepted; at most %.1f KiB of "
           "memory and %.1f ms for one\n",
           TARGET.name, static_cast<long long>(n_stored), static_cast<long long>(accepted_stored),
           static_cast<long long>(n), static_cast<double>(r.n_run) / elapsed(), 100 * accepted,
           static_cast<double>(r.mem_worst) / 1024, 1000 * r.slowest);
    if (n >= 2000 && (accepted < 0.01 || accepted > 0.97)) {
        fprintf(stderr, "fuzz-%s: %.3f of the mutants accepted: too few or too many\n", TARGET.name, accepted);
        return 1;
    }
    return 0;
}

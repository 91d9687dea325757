#include "backend/load-session.h"
#include "backend/log.h"
#include "backend/registered-devices.h"
#include "ggml-backend-impl.h"
#include "gguf/names.h"
#include "load/compress.h"
#include "load/matrix-file.h"
#include "load/thresholds.h"
#include "load/zero-inputs.h"
#include "platform/descriptors.h"
#include "platform/environment.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstring>

namespace macko {

static thread_local load_session *                current_session = nullptr;
static thread_local std::unique_ptr<load_session> link_session; // the load of a link

load_session * load_session::current() {
    if (current_session && current_session->is_link() && !is_open(current_session->link_)) {
        end_link();
    }
    return current_session;
}

// ---- links ----

bool load_session::is_open(const open_link & link) {
    platform::file_status now;
    return platform::get_descriptor_status(link.fd, &now) && is_same_file(now, link.opened);
}

std::vector<load_session::open_link> load_session::find_links() {
    std::vector<open_link> links;
    for (const int fd : platform::open_descriptors()) {
        open_link  link{ fd, {} };
        const auto is_known = [&](const open_link & other) { return is_same_file(link.opened, other.opened); };
        if (!platform::get_descriptor_status(fd, &link.opened) || !link.opened.is_regular ||
            std::any_of(links.begin(), links.end(), is_known)) {
            continue;
        }
        model_file file; // opened again, because the descriptor of llama.cpp may need aligned reads
        if (file.open(platform::path_of_descriptor(fd).c_str()) == GGML_MACKO_STATUS_OK && macko::is_link(file)) {
            links.push_back(link);
        }
    }
    return links;
}

void load_session::end_link() {
    current_session = nullptr;
    link_session.reset();
}

load_session * load_session::current_or_linked(const std::function<int()> & check) {
    load_session * session = current();
    if (session || link_session) { // the load of a link may be suspended
        return session;
    }
    const int status = c_boundary([&] {
        const std::vector<open_link> links = find_links();
        if (!links.empty()) {
            link_session.reset(new load_session());
            link_session->begin_link(links[0], links.size(), check);
            current_session = link_session.get();
        }
        return GGML_MACKO_STATUS_OK;
    });
    if (status) {
        log_error("ggml-macko: %s\n", ggml_macko_last_error());
    }
    return current_session;
}

void load_session::begin_link(const open_link & link, size_t n_links, const std::function<int()> & check) {
    link_                  = link;
    file_                  = std::make_unique<model_file>();
    const std::string path = platform::name_of_descriptor(link.fd);
    const auto        open = [&]() -> int {
        platform::file_status at_path;
        TRY(check());
        if (n_links > 1) {
            return fail(GGML_MACKO_STATUS_LOAD_FAILED, "%s: another link is open: load one after the other",
                               path.c_str());
        }
        if (!platform::get_path_status(path, &at_path) || !is_same_file(at_path, link.opened)) {
            return fail(GGML_MACKO_STATUS_FILE_CHANGED, "%s: the link was replaced or deleted", path.c_str());
        }
        std::unique_ptr<load_session> opened;
        TRY(load_session::open(path.c_str(), static_cast<int32_t>(environment::words_of(environment::LOAD)), false,
                                      &opened));
        file_ = std::move(opened->file_);
        loaded_.assign(file_->sparse.size(), false);
        index_names();
        return GGML_MACKO_STATUS_OK;
    };
    if (const int status = open()) {
        keep_error(status);
        log_error("ggml-macko: %s\n", error_.text.c_str());
    }
}

// ---- tensors ----

load_session::none_current::none_current() : outer_(current_session) { current_session = nullptr; }

load_session::none_current::~none_current() { current_session = outer_; }

const sparse_tensor_info * load_session::find(const ggml_tensor * tensor) const {
    const auto it = by_name_.find(tensor->name);
    if (it == by_name_.end()) {
        return nullptr;
    }
    const sparse_tensor_info & m         = *it->second;
    const bool                 same_type = tensor->type == m.desc.type || (is_link() && tensor->type == LINK_TYPE);
    return same_type && !tensor->view_src && !memcmp(tensor->ne, m.ne, sizeof(m.ne)) ? &m : nullptr;
}

ggml_status load_session::claim_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    load_session *             session = current();
    const sparse_tensor_info * matrix  = session ? session->find(tensor) : nullptr;
    if (matrix && session->is_link()) {
        buffer->iface.set_tensor(buffer, tensor, nullptr, 0, 0);
        const char * path = session->file_->path.c_str();
        if (session->error_.any() ? fail(session->error_.status, "%s: %s", path, session->error_.text.c_str())
                                  : session->file_->check_unchanged()) {
            log_error("ggml-macko: %s\n", ggml_macko_last_error());
            return GGML_STATUS_FAILED;
        }
    } else if (matrix) {
        session->dense_->claim(matrix - session->file_->sparse.data());
    }
    return GGML_STATUS_SUCCESS;
}

bool load_session::ignores(ggml_tensor * tensor, const sparse_tensor_info & matrix, size_t offset, size_t size) const {
    if (!is_link()) {
        return offset > 0;
    }
    if (!loaded_[static_cast<size_t>(&matrix - file_->sparse.data())]) {
        return false;
    }
    if (tensor->type == LINK_TYPE && offset + size == ggml_nbytes(tensor)) {
        tensor->type  = static_cast<ggml_type>(matrix.desc.type);
        tensor->nb[0] = static_cast<size_t>(value_nbytes(matrix.desc.type));
        for (int d = 1; d < GGML_MAX_DIMS; d++) {
            tensor->nb[d] = tensor->nb[d - 1] * static_cast<size_t>(tensor->ne[d - 1]);
        }
    }
    return true;
}

bool load_session::is_claimed(const ggml_tensor * tensor) const {
    const sparse_tensor_info * matrix = find(tensor);
    return matrix && dense_ && dense_->is_claimed(matrix - file_->sparse.data());
}

int load_session::make_matrix_file(const sparse_tensor_info & matrix, std::unique_ptr<model_file> * out) const {
    return macko::make_matrix_file(*file_, matrix, out);
}

int load_session::receive(const ggml_tensor * tensor, const void * data, size_t size, payload_consumer & consumer) {
    return deliver(tensor, data, size, [&](const sparse_tensor_info & matrix) {
        return read_payload(*file_, file_->header, matrix, 0, consumer, &this_thread().memory);
    });
}

int load_session::deliver(const ggml_tensor * tensor, const void * data, size_t size,
                          const std::function<int(const sparse_tensor_info &)> & take) {
    const sparse_tensor_info * matrix = nullptr;
    const int                  status = match(tensor, data, size, &matrix);
    return status ? status : finish(*matrix, [&] { return take(*matrix); });
}

void load_session::receive_soon(const ggml_tensor * tensor, const void * data, size_t size,
                                const std::function<int(load_thread &, const payload_source &)> & take) {
    const sparse_tensor_info * matrix = nullptr;
    if (match(tensor, data, size, &matrix)) {
        return;
    }
    const auto receive_on = [this, matrix, take](load_thread & thread) {
        finish(*matrix, [&] {
            return take(thread, [&](payload_consumer & consumer) {
                return read_payload(*file_, file_->header, *matrix, 0, consumer, &thread.memory);
            });
        });
    };
    if (is_link() || !second_.start([this, receive_on] { receive_on(of_threads_[1]); })) {
        receive_on(this_thread());
    }
}

int load_session::match(const ggml_tensor * tensor, const void * data, size_t size, const sparse_tensor_info ** out) {
    const int status = c_boundary([&]() -> int {
        *out = find(tensor);
        if (!*out || (!is_link() && *out - file_->sparse.data() != dense_->match_placeholder(data, size))) {
            return fail(GGML_MACKO_STATUS_LOAD_FAILED, "%s: data did not come from this load's file",
                        printable(tensor->name).text);
        }
        return GGML_MACKO_STATUS_OK;
    });
    if (status) {
        keep_error(status);
    }
    return status;
}

int load_session::finish(const sparse_tensor_info & matrix, const std::function<int()> & take) {
    const int64_t index  = &matrix - file_->sparse.data();
    const int     status = c_boundary(take);
    if (status) {
        error_.set(index, status);
    } else {
        const std::lock_guard<std::mutex> lock(mutex_);
        loaded_[static_cast<size_t>(index)] = true;
    }
    return status;
}

void load_session::keep_out_of_memory(const char * format, ...) {
    char    text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    log_error("%s\n", text);
    if (current_session) {
        current_session->keep_error(fail(GGML_MACKO_STATUS_OUT_OF_MEMORY, "%s", text));
    }
}

static void log_compressed(const model_file & file) {
    int64_t dense = 0, sparse = 0, n_negative_zeros = 0;
    for (const sparse_tensor_info & m : file.sparse) {
        dense += m.nbytes_dense;
        n_negative_zeros += m.n_negative_zeros;
        sparse += m.n_padded * value_nbytes(m.desc.type) + deltas_nbytes(m.n_padded, m.desc.delta_bits) +
                  4 * (m.desc.rows + 1);
    }
    log_info("ggml-macko: %s: compressing %zu of %zu tensors while loading: %.1f MiB -> %.1f MiB\n", file.path.c_str(),
             file.sparse.size(), file.header.tensors.size(), static_cast<double>(dense) / 1048576,
             static_cast<double>(sparse) / 1048576);
    if (n_negative_zeros > 0) {
        log_info("ggml-macko: %s: %" PRId64 " negative zeros count as zeros; GGML_MACKO_LOAD=keep-negative-zeros "
                 "keeps them\n",
                 file.path.c_str(), n_negative_zeros);
    }
}

static void log_skips(const model_file & file, const char * none) {
    if (none) {
        log_warn("ggml-macko: %s: GGML_MACKO_LOAD=act-thresholds skips nothing: %s\n", file.path.c_str(), none);
        return;
    }
    const auto n = std::count_if(file.sparse.begin(), file.sparse.end(),
                                 [](const sparse_tensor_info & m) { return m.threshold > 0; });
    log_info("ggml-macko: %s: on the CPU, inputs below the thresholds of %zu weights count as zero, one token at a "
             "time\n",
             file.path.c_str(), static_cast<size_t>(n));
}

static constexpr char EMBEDDINGS[] = "token_embd.weight";

// Decides which weights devices keep by columns, which are in no product, and which inputs count as zero. Runs once, so
// all sizes of a load agree.
static int choose_uses(model_file * file, bool thresholds, bool logs) {
    const bool has_columns = !environment::is_disabled("csc");
    if (thresholds) {
        const char * none = "GGML_MACKO_DISABLE=csc";
        if (const int status = has_columns ? set_thresholds(file, &none) : GGML_MACKO_STATUS_OK) {
            prefix_error(file->path.c_str());
            return status;
        }
        if (logs) {
            log_skips(*file, none);
        }
    }
    const bool has_head = std::any_of(file->header.tensors.begin(), file->header.tensors.end(), [](const auto & t) {
        return starts_with(t.name, "output.weight"); // or one of its components
    });
    for (sparse_tensor_info & m : file->sparse) {
        m.is_only_looked_up = has_head && m.name == EMBEDDINGS;
        m.by_columns        = has_columns && (has_zero_inputs(file->arch, m.name) || m.threshold > 0);
    }
    return GGML_MACKO_STATUS_OK;
}

int load_session::open(const char * path, int32_t flags, bool no_alloc, std::unique_ptr<load_session> * out) {
    const compression how    = !(flags & GGML_MACKO_LOAD_COMPRESS)           ? compression::off
                               : flags & GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS ? compression::bit_exact
                                                                             : compression::on;
    const bool        strict = flags & GGML_MACKO_LOAD_STRICT, thresholds = flags & GGML_MACKO_LOAD_ACT_THRESHOLDS;
    std::unique_ptr<load_session> s(new load_session());
    s->no_alloc_ = no_alloc;
    if (const int status = model_file_open_sparse(path, how, strict, &s->file_)) {
        if (how != compression::off && status == GGML_MACKO_STATUS_NOT_SPARSE && !no_alloc) {
            log_warn("ggml-macko: not compressed: %s\n", ggml_macko_last_error());
        }
        if (thresholds && status == GGML_MACKO_STATUS_NOT_SPARSE && !no_alloc) {
            log_warn("ggml-macko: GGML_MACKO_LOAD=act-thresholds skips nothing: %s\n", ggml_macko_last_error());
        }
        return status;
    }
    if (!s->file_->has_rules && !no_alloc) {
        log_warn("ggml-macko: %s: there are no rules for the metadata of architecture '%s': apart from the general "
                 "checks, the file is trusted like a dense model; GGML_MACKO_LOAD=strict refuses it\n",
                 s->file_->path.c_str(), s->file_->arch.c_str());
    }
    if (s->file_->sparse[0].is_encoded_on_load() && !no_alloc) {
        log_compressed(*s->file_);
    }
    TRY(choose_uses(s->file_.get(), thresholds, !no_alloc));
    *out = std::move(s);
    return GGML_MACKO_STATUS_OK;
}

// Logs why the load continues without a cache.
static void log_no_cache() { log_warn("ggml-macko: no cache: %s\n", ggml_macko_last_error()); }

void load_session::open_cache(const char * cache_for) {
    const auto has = [&](bool (*what)(const sparse_tensor_info &)) {
        return std::any_of(matrices().begin(), matrices().end(), what);
    };
    const auto made_for = [&] {
        return cache_for + std::string(has([](const auto & m) { return m.by_columns; }) ? ", columns" : "") +
               (has([](const auto & m) { return m.threshold > 0; }) ? ", thresholds" : "");
    };
    if (c_boundary([&] { return weight_cache::open(*file_, made_for(), &cache_); })) {
        log_no_cache();
    }
}

void load_session::add_to_cache(const std::string & name, const void * memory, size_t nbytes) {
    if (c_boundary([&] { return cache_->add(name, memory, static_cast<int64_t>(nbytes)); })) {
        log_no_cache();
        cache_.reset();
    }
}

void load_session::commit_cache() {
    if (c_boundary([&] { return cache_->commit(); })) {
        log_no_cache();
    } else if (cache_->nbytes_written() > 0) {
        log_info("ggml-macko: cache: wrote %.1f MiB to %s\n", static_cast<double>(cache_->nbytes_written()) / 1048576,
                 cache_->path().c_str());
    } else if (cache_->n_mapped() > 0) {
        log_info("ggml-macko: cache: mapped %d weights, %.1f MiB, from %s\n", cache_->n_mapped(),
                 static_cast<double>(cache_->nbytes_mapped()) / 1048576, cache_->path().c_str());
    }
    cache_.reset();
}

int load_session::begin(bool sparse_only, const char * cache_for, FILE ** stream) {
    threads_.emplace();
    TRY(dense_stream::create(*file_, &dense_));
    if (cache_for) {
        open_cache(cache_for);
    }
    if (sparse_only) {
        dense_->refuse_unclaimed();
    }
    loaded_.assign(file_->sparse.size(), false);
    index_names();
    stream_ = dense_->open_stream();
    if (!stream_) {
        prefix_error(file_->path.c_str());
        return GGML_MACKO_STATUS_IO;
    }
    *stream         = stream_;
    outer_          = current_session;
    current_session = this;
    return GGML_MACKO_STATUS_OK;
}

// Whether the process has a GPU, or a server, of a backend other than this plugin.
static bool has_foreign_gpu() {
    const std::vector<ggml_backend_dev_t> devices = registered_devices();
    return std::any_of(devices.begin(), devices.end(), [](ggml_backend_dev_t device) {
        const auto type = ggml_backend_dev_type(device);
        return type != GGML_BACKEND_DEVICE_TYPE_CPU && type != GGML_BACKEND_DEVICE_TYPE_ACCEL &&
               strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), "MACKO") != 0;
    });
}

void load_session::index_names() {
    for (const sparse_tensor_info & m : file_->sparse) {
        // If embeddings are also the head, llama.cpp may create a second tensor of this name on a GPU, which needs the
        // dense elements. The stream has either those or a placeholder, so the embeddings stay dense, too. A link has
        // no dense elements.
        const bool may_be_dense = m.name == EMBEDDINGS && !m.is_only_looked_up && !is_link() && has_foreign_gpu();
        // llama.cpp checks one operation per weight for a device, but an architecture may also use the weight in
        // another operation, which ends the process if the weight is sparse. So for an architecture without rules, only
        // weights with a known use become sparse.
        if (!may_be_dense && (file_->has_rules || weight_use(m.name, m.n_dims) != GGML_MACKO_WEIGHT_OTHER)) {
            by_name_.emplace(m.name, &m);
        }
    }
}

void load_session::stop() {
    wait();
    threads_.reset();
    if (stream_) {
        current_session = outer_;
        fclose(stream_); // close it here: an exit handler would call hooks of an unloaded library
        stream_ = nullptr;
    }
}

int load_session::end(bool model_loaded, bool with_weights) {
    stop();
    const std::string & path = file_->path;
    if (error_.any()) {
        return fail(error_.status, "%s: %s", path.c_str(), error_.text.c_str());
    }
    TRY(dense_->status());
    TRY(file_->check_unchanged());
    if (!model_loaded) {
        return fail(GGML_MACKO_STATUS_LOAD_FAILED, "%s: llama.cpp could not load the model; its log says why",
                    path.c_str());
    }
    for (size_t i = 0; with_weights && i < loaded_.size(); i++) {
        if (!loaded_[i] && dense_->is_claimed(static_cast<int64_t>(i))) { // it has no values
            return fail(GGML_MACKO_STATUS_LOAD_FAILED, "%s: %s: llama.cpp did not read it", path.c_str(),
                        file_->sparse[i].name.c_str());
        }
    }
    const dense_stream::dense_reads dense = dense_->decoded();
    if (dense.n > 0) {
        log_warn("ggml-macko: %s: %" PRId64 " of %zu sparse tensors became dense, %.1f MiB -> %.1f MiB, because "
                 "llama.cpp placed them on a device of another backend; -dev MACKO0, -ngl 0 or RPC servers that "
                 "`macko run` starts keep them sparse\n",
                 path.c_str(), dense.n, loaded_.size(), static_cast<double>(dense.nbytes_stored) / 1048576,
                 static_cast<double>(dense.nbytes_dense) / 1048576);
    }
    if (cache_ && with_weights) {
        commit_cache();
    }
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko

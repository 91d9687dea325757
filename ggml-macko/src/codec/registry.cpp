#include "codec/registry.h"
#include "codec/ec-csr/ec-csr.h"
#include "codec/macko/matrix-view.h"
#include "codec/packed/packed.h"
#include "codec/quantized/quantized.h"

#include <algorithm>
#include <cstring>

namespace macko {

static std::vector<const codec *> & table() {
    static std::vector<const codec *> codecs = { &macko_codec(), &ec_csr_codec(), &packed_codec(), &quantized_codec() };
    return codecs;
}

const std::vector<const codec *> & all_codecs() { return table(); }

const codec * find_codec(std::string_view name) {
    for (const codec * c : table()) {
        if (name == c->name()) {
            return c;
        }
    }
    return nullptr;
}

int find_format(const char * name, const codec ** format) {
    *format = name ? find_codec(name) : nullptr;
    return *format ? static_cast<int>(GGML_MACKO_STATUS_OK)
                   : fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "format '%s' is not known to this build",
                          name ? printable(name).text : "(null)");
}

const codec & rows_codec() { return macko_codec(); }

int register_codec(const codec & format) {
    const auto & suffixes = format.components();
    const bool   fits     = !suffixes.empty() && suffixes.size() <= GGML_MACKO_MAX_ARRAYS &&
                      format.options().size() <= GGML_MACKO_MAX_OPTIONS &&
                      std::all_of(suffixes.begin(), suffixes.end(), [](const char * s) {
                          return s[0] == '.' && strlen(s) > 1 && strlen(s) <= MAX_SUFFIX;
                      });
    if (!fits || find_codec(format.name())) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "format '%s' already exists or exceeds a limit", format.name());
    }
    table().push_back(&format);
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
